"""The processor's endpoints: what a service calls over the request plane."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from dynamo.application import Gateway
from dynamo.application.gateway import ServedModel
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.settings import Settings
from dynamo.services.processor import ProcessorEndpoints


class RecordingProcessor:
    """Keeps the contexts of its calls and answers nothing."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    async def chat(self, request: Any, context: Context, reply: Any) -> None:
        self.contexts.append(context)


async def test_calls_under_one_request_id_have_ids_of_their_own() -> None:
    processor, gateway = RecordingProcessor(), Gateway()
    gateway.add(ServedModel(("tiny",), processor, 0, 4096))  # type: ignore[arg-type]
    runtime: Any = SimpleNamespace(settings=Settings(), clock=SystemClock())
    endpoints = ProcessorEndpoints(runtime, gateway)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    out: Any = SimpleNamespace(context=Context("mine"), send=lambda item: True)

    for _ in range(2):
        await endpoints._handle_chat(msgspec.msgpack.encode(body), out)

    ids = [context.request_id for context in processor.contexts]
    assert len(set(ids)) == 2
    assert all(own_id.startswith("mine") for own_id in ids)
