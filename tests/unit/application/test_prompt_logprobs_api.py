"""Logprobs of prompts in answers: vLLM's field, and completions that echo."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.application.test_chat_api import ask

from dynamo.core.context import Context
from dynamo.core.text import (
    ChatRequest,
    CompletionRequest,
    DecodedPromptToken,
    DecodedTokenLogprob,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started

COMPLETIONS = "/v1/completions"
PROMPT = [
    DecodedPromptToken(5, "a", b"a", 0),
    DecodedPromptToken(6, " b", b" b", 1, -3.0, 9, ((7, " c", b" c", -0.5), (8, " d", b" d", -1))),
]
FIELD = [
    None,
    {
        "6": {"logprob": -3.0, "rank": 9, "decoded_token": " b"},
        "7": {"logprob": -0.5, "rank": 1, "decoded_token": " c"},
    },
]


@pytest.fixture
def answered(site: Any, monkeypatch: Any) -> None:
    """Let the site answer with the logprobs of its prompt, if the request wants any."""

    async def answer(
        request: ChatRequest | CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        site.processor.requests.append(request)
        reply.prompt(2)
        reply.begin(0, Started())
        if isinstance(request, CompletionRequest) and request.echo:
            reply.text(0, "a b")
        if request.options.prompt_logprobs is not None:
            reply.prompt_logprobs(0, PROMPT)
        if request.options.max_tokens != 0:
            reply.text(0, "e", [DecodedTokenLogprob("e", b"e", -0.1, (("e", b"e", -0.1),), 3)])
        reply.finish(0, TextFinish("length", 1))

    monkeypatch.setattr(site.processor, "chat", answer)
    monkeypatch.setattr(site.processor, "complete", answer)


@pytest.mark.usefixtures("answered")
async def test_an_echo_has_the_logprobs_of_prompt_and_answer(site: Any, connect: Any) -> None:
    fields = {"prompt": "a b", "echo": True, "logprobs": 1}
    body = (await ask(connect, site, COMPLETIONS, max_tokens=1, **fields)).json
    [choice] = body["choices"]
    assert choice["text"] == "a be"
    assert choice["logprobs"] == {
        "tokens": ["a", " b", "e"],
        "text_offset": [0, 1, 3],
        "token_logprobs": [None, -3.0, -0.1],
        "top_logprobs": [None, {" c": -0.5, " b": -3.0}, {"e": -0.1}],
    }
    assert choice["prompt_logprobs"] is None
    assert site.processor.requests[-1].options.prompt_logprobs == 1
    [choice] = (await ask(connect, site, COMPLETIONS, max_tokens=0, **fields)).json["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("a b", ["a", " b"])


@pytest.mark.usefixtures("answered")
async def test_the_field_of_vllm(site: Any, connect: Any) -> None:
    body = (await ask(connect, site, COMPLETIONS, prompt="a b", prompt_logprobs=1)).json
    assert body["choices"][0]["prompt_logprobs"] == FIELD
    body = (await ask(connect, site, prompt_logprobs=1)).json
    assert body["prompt_logprobs"] == FIELD
    assert (await ask(connect, site)).json["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
async def test_streams_have_none(
    site: Any, connect: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await ask(connect, site, path, stream=True, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert not site.processor.requests


async def test_a_service_without_them_is_an_error(site: Any, connect: Any) -> None:
    answer = await ask(connect, site, prompt_logprobs=1)
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported")
