"""A chat without HTTP: workers in child processes, processor and router in this process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from dynamo.application import Gateway
from dynamo.application.gateway import DEFAULT_MODEL
from dynamo.core.context import Context
from dynamo.core.settings import Settings
from dynamo.core.text import (
    AnswerEvent,
    ChatRequest,
    DecodedTokenLogprob,
    ReasoningDelta,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.services.deployment.launch import worker_specs
from dynamo.services.deployment.temporary import run_with_supervisor, temporary_settings
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.routing import ProcessRouting
from dynamo.telemetry.logs import set_levels

WriteText = Callable[[str], None]
ReadMessages = Callable[[], AsyncGenerator[str, None]]
"""Called once when a model is ready; yields the user's messages."""


async def converse(settings: Settings, read_messages: ReadMessages, write: WriteText) -> int:
    """Answer every message, with the conversation before it, and return the exit code.

    Raises the error of an answer, or the error that keeps a worker from starting.
    """
    settings = temporary_settings(settings, "text")
    set_levels(settings.logging.level)
    supervisor = Supervisor(worker_specs(settings), deployment_of(settings), settings)
    conversation = _run_conversation(settings, read_messages, write)
    code, chat = await run_with_supervisor(supervisor, conversation)
    if supervisor.failure is not None:
        raise supervisor.failure.to_error()
    if not chat.cancelled():
        chat.result()
    return code


async def _run_conversation(
    settings: Settings, read_messages: ReadMessages, write: WriteText
) -> None:
    async with await DistributedRuntime.create(settings, role="console") as runtime:
        gateway = Gateway()
        ModelWatcher(runtime, gateway, ProcessRouting(runtime)).start()
        await _wait_until_healthy(runtime)
        history: list[dict[str, str]] = []
        async with aclosing(read_messages()) as messages:
            async for message in messages:
                history.append({"role": "user", "content": message})
                answer = await _answer_message(gateway, history, write)
                history.append({"role": "assistant", "content": answer})


async def _answer_message(
    gateway: Gateway, history: Sequence[dict[str, str]], write: WriteText
) -> str:
    name, served = gateway.find(DEFAULT_MODEL)
    reply = CollectedTextReply(write)
    request = ChatRequest(model=name, messages=tuple(history))
    try:
        await served.processor.chat(request, Context(request_id=secrets.token_hex(8)), reply)
    finally:
        write("\n")
    return "".join(reply.parts)


async def _wait_until_healthy(runtime: DistributedRuntime) -> None:
    changed = asyncio.Event()
    runtime.health.on_change(changed.set)
    while not runtime.health.healthy:
        changed.clear()
        await changed.wait()


class CollectedTextReply(TextReply):
    """Writes text as it arrives and collects it in `parts`."""

    def __init__(self, write: WriteText) -> None:
        self._write = write
        self._reasoned = False
        self.parts: list[str] = []

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None: ...

    def begin(self, choice: int, started: Started) -> None: ...

    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        """Write and collect the text."""
        del choice, logprobs
        self._write(f"\n\n{delta}" if self._reasoned else delta)
        self._reasoned = False
        self.parts.append(delta)
        return True

    def event(self, choice: int, event: AnswerEvent) -> bool:
        """Write reasoning, which is not part of the collected answer."""
        del choice
        if isinstance(event, ReasoningDelta):
            self._write(event.text)
            self._reasoned = True
        return True

    def finish(self, choice: int, end: TextFinish) -> None: ...
