"""The processor reads logprobs of prompts: offsets, dropped answers and missing values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import TooLarge, WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.text import CompletionRequest, DecodedPromptToken, TextOptions
from dynamo.core.values import Finish, GenerateRequest, PromptTokenLogprob, Started, TokenLogprobs

CONTEXT = Context("r")
OPTIONS = TextOptions(max_tokens=2, top_logprobs=1, prompt_logprobs=1)


class PromptEngine:
    """Answers two tokens, and a logprob for each token of the prompt."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.missing = 0

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.requests.append(request)
        ids = unpack_ids(request.token_ids)
        entries = [PromptTokenLogprob(token, -1.0, 2, ((ids[0], -0.5),)) for token in ids[1:]]
        reply.begin(Started())
        answer = ids[: request.stops.max_tokens]
        for token in answer:
            if not reply.tokens((token,), [TokenLogprobs(token, -0.1, ((token, -0.1),))]):
                return
        known = tuple(entries[self.missing :])
        reply.finish(Finish("length", len(answer), prompt_logprobs=known))


def collect(reply: Any) -> dict[int, Sequence[DecodedPromptToken]]:
    prompts: dict[int, Sequence[DecodedPromptToken]] = {}
    reply.prompt_logprobs = prompts.__setitem__
    return prompts


async def test_prompt_and_answer_have_offsets_of_one_text(
    make_processor: Any, recording_reply: Any
) -> None:
    engine, reply = PromptEngine(), recording_reply()
    prompts = collect(reply)
    request = CompletionRequest("m", "the quick fox é", OPTIONS, echo=True)
    await make_processor(engine.send).complete(request, CONTEXT, reply)
    tokens = prompts[0]
    assert engine.requests[0].prompt_logprobs == 1
    assert b"".join(token.raw for token in tokens).decode() == "the quick fox é"
    assert [token.offset for token in tokens] == sorted(token.offset for token in tokens)
    assert (tokens[0].logprob, tokens[0].offset) == (None, 0)
    assert (tokens[1].logprob, tokens[1].rank) == (-1.0, 2)
    assert tokens[1].top[0][0] == tokens[0].token_id
    assert reply.whole().startswith("the quick fox é")
    assert reply.logprobs[0].offset == len("the quick fox é")


async def test_an_answer_of_no_tokens_is_dropped(make_processor: Any, recording_reply: Any) -> None:
    engine, reply = PromptEngine(), recording_reply()
    prompts = collect(reply)
    options = replace(OPTIONS, max_tokens=0)
    request = CompletionRequest("m", "the quick fox", options, echo=True)
    await make_processor(engine.send).complete(request, CONTEXT, reply)
    assert engine.requests[0].stops.max_tokens == 1
    assert reply.whole() == "the quick fox"
    assert prompts[0]


async def test_missing_and_too_many_logprobs_are_errors(
    make_processor: Any, recording_reply: Any
) -> None:
    engine = PromptEngine()
    engine.missing = 1
    processor = make_processor(engine.send, context_tokens=100_000)
    reply = recording_reply()
    collect(reply)
    request = CompletionRequest("m", "the quick fox", OPTIONS)
    with pytest.raises(WorkerFailed, match="logprobs of"):
        await processor.complete(request, CONTEXT, reply)
    with pytest.raises(TooLarge, match="prompt_logprobs"):
        await processor.complete(replace(request, prompt="fox 1 " * 10_000), CONTEXT, reply)
