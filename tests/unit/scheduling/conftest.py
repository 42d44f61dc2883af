"""A processor with a tiny tokenizer, between a scripted engine and a recording reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.reply import Reply
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import DecodedTokenLogprob, TextFinish, TextReply
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.models.card import ModelCard
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.file_cache import file_ref
from dynamo.models.tokenization.tokenizer import Tokenizer
from dynamo.scheduling.processor import ChatProcessor

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 2


class RecordingReply(TextReply):
    """Records all calls in order and wants no more after `limit` deltas."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.calls: list[tuple[Any, ...]] = []
        self.logprobs: list[DecodedTokenLogprob] = []

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        self.calls.append(("prompt", prompt_tokens))

    def begin(self, choice: int, started: Started) -> None:
        self.calls.append(("begin", choice))

    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        assert delta or logprobs
        self.calls.append(("text", choice, delta))
        self.logprobs += logprobs or ()
        return self.limit is None or len(self.deltas()) < self.limit

    def finish(self, choice: int, end: TextFinish) -> None:
        self.calls.append(("finish", choice, end))

    def deltas(self, choice: int | None = None) -> list[str]:
        calls = [call for call in self.calls if call[0] == "text"]
        return [call[2] for call in calls if choice in (None, call[1])]

    def whole(self, choice: int | None = None) -> str:
        return "".join(self.deltas(choice))

    def ends(self) -> dict[int, TextFinish]:
        return {call[1]: call[2] for call in self.calls if call[0] == "finish"}


class ScriptedEngine:
    """Answers every request with the same ids, in place of router and worker."""

    def __init__(self, ids: Sequence[int], end: Finish | None = None) -> None:
        self.ids = ids
        self.end = end or Finish("stop", stop_token=EOS)
        self.requests: list[GenerateRequest] = []
        self.failing: dict[int, Exception] = {}
        self.cancelled: list[int] = []
        self.hold: asyncio.Event | None = None

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.requests.append(request)
        reply.begin(Started(worker="w1"))
        if request.choice in self.failing:
            raise self.failing[request.choice]
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.choice)
            raise
        for token in self.ids[: request.stops.max_tokens]:
            if not reply.tokens((token,)):
                return
            await asyncio.sleep(0)
        reply.finish(self.end)

    def prompts(self) -> list[tuple[int, ...]]:
        return [unpack_ids(request.token_ids) for request in self.requests]


class CountingClock(SystemClock):
    """Records the functions that are offloaded and runs them at once."""

    def __init__(self) -> None:
        self.offloaded: list[str] = []

    async def offload(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        self.offloaded.append(work.__name__)
        return work(*args, **kwargs)


@pytest.fixture
def ids_of(tokenizer: Tokenizer) -> Callable[[str], tuple[int, ...]]:
    return lambda text: unpack_ids(tokenizer.encode(text))


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
def recording_reply() -> type[RecordingReply]:
    return RecordingReply


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def make_processor(
    tokenizer: Tokenizer, tiny_model: Path, clock: CountingClock
) -> Callable[..., ChatProcessor]:
    """Return a factory of processors."""

    def make(
        send: Any,
        *,
        context_tokens: int = 4096,
        generation: dict[str, Any] | None = None,
        sampling: SamplingSettings | None = None,
        template: str | None = TEMPLATE,
    ) -> ChatProcessor:
        card = ModelCard(
            names=("tiny", "alias"),
            context_tokens=context_tokens,
            vocab_size=tokenizer.vocab_size,
            tokenizer=file_ref(tiny_model / "tokenizer.json"),
            eos_token_ids=(EOS,),
            generation=generation or {},
        )
        chat = ChatTemplate(template)
        configured = sampling or SamplingSettings()
        return ChatProcessor(card, tokenizer, chat, send, configured, clock, Random(7))

    return make
