"""Models that services offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dynamo.application import Gateway
from dynamo.core.context import Context
from dynamo.core.errors import Unsupported
from dynamo.core.text import ChatRequest, TextFinish, TextReply
from dynamo.core.values import Started
from dynamo.sdk.service_model import ServiceModelRecord
from dynamo.services import service_models
from dynamo.services.service_models import ServiceModelProcessor


class Calls(TextReply):
    def __init__(self) -> None:
        self.names: list[str] = []

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        self.names.append("prompt")

    def begin(self, choice: int, started: Started) -> None:
        self.names.append("begin")

    def text(self, choice: int, delta: str, logprobs: Any = None) -> bool:
        self.names.append(delta)
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        self.names.append("finish")


async def test_a_chat_is_accepted_before_its_service_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that waits for a slow service sends its head."""
    reply, client, gateway = Calls(), object(), Gateway()

    async def call(_: Any, __: bytes, ___: Context, sink: Callable[[bytes], bool]) -> None:
        reply.names.append("called")
        sink(msgspec.msgpack.encode("hi"))

    monkeypatch.setattr(service_models, "call_with_retries", call)
    record = ServiceModelRecord("m", "n", "c", "e", streams=True, derived=False)
    processor: Any = ServiceModelProcessor
    request = ChatRequest("m", ({"role": "user", "content": "x"},))
    await processor(record, client, gateway, "keep").chat(request, Context("1"), reply)
    assert reply.names[:2] == ["prompt", "called"]
    assert "hi" in reply.names


@pytest.mark.parametrize("method", ["tokenize", "detokenize", "token_strings", "token_bytes"])
async def test_a_service_has_no_tokens(method: str) -> None:
    record = ServiceModelRecord("m", "n", "c", "e", streams=True, derived=False)
    client: Any = object()
    processor = ServiceModelProcessor(record, client, Gateway(), "keep")
    with pytest.raises(Unsupported, match="without tokenizer"):
        await getattr(processor, method)([1])
