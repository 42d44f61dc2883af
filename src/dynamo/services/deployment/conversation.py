"""A conversation without HTTP: workers under this process, and the frontend's own path in it."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TextIO

from msgspec.structs import replace

from dynamo.application import Gateway
from dynamo.application.gateway import DEFAULT_MODEL
from dynamo.core.context import Context
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.text import ChatRequest, DecodedTokenLogprob, TextFinish, TextReply
from dynamo.core.values import Started
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.services.deployment.launch import deployment_specs
from dynamo.services.model_pipeline import WORKER_COMPONENT
from dynamo.services.model_watcher import ModelWatcher
from dynamo.services.routing import ProcessRouting
from dynamo.telemetry.logs import set_levels

WriteText = Callable[[str], None]
ReadMessages = Callable[[], AsyncGenerator[str, None]]
"""Called once when a model is ready; what the user says, a message each."""

DEFAULT_LOG_LEVEL = "info"
QUIET_LOG_LEVEL = "warn"


async def converse(
    settings: Settings, lines: ReadMessages, write: WriteText, logs: TextIO = sys.stderr
) -> int:
    """Answer every message of `lines`, with what was said before it, until they end. Returns the
    exit code. Raises what an answer raises, and what keeps a worker from ever starting."""
    settings = _private_deployment(settings)
    set_levels(settings.logging.level)
    specs = [spec for spec in deployment_specs(settings) if spec.role == WORKER_COMPONENT]
    supervisor = Supervisor(specs, deployment_of(settings), settings, out=logs)
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:  # both results are taken below
        ends = tasks.start(supervisor.run(), "supervisor")
        talk = tasks.start(_run_conversation(settings, lines, write), "conversation")
        stopped = tasks.start(supervisor.stopping.wait(), "stopped")  # Ctrl-C ends an answer, too
        await asyncio.wait([ends, talk, stopped], return_when=asyncio.FIRST_COMPLETED)
        talk.cancel()
        await asyncio.wait([talk])
        if not supervisor.stopping.is_set():
            supervisor.stop()
        code = await ends
    if supervisor.failure is not None:
        raise supervisor.failure.to_error()
    if not talk.cancelled():
        talk.result()
    return code


async def _run_conversation(settings: Settings, lines: ReadMessages, write: WriteText) -> None:
    async with await DistributedRuntime.create(settings, role="console") as runtime:
        gateway = Gateway()
        ModelWatcher(runtime, gateway, ProcessRouting(runtime)).start()
        await _wait_until_healthy(runtime)
        said: list[dict[str, str]] = []
        async with aclosing(lines()) as messages:
            async for message in messages:
                said.append({"role": "user", "content": message})
                said.append(
                    {"role": "assistant", "content": await _answer_message(gateway, said, write)}
                )


async def _answer_message(
    gateway: Gateway, said: Sequence[dict[str, str]], write: WriteText
) -> str:
    name, served = gateway.find(DEFAULT_MODEL)
    reply = CollectedTextReply(write)
    request = ChatRequest(model=name, messages=tuple(said))
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


def _private_deployment(settings: Settings) -> Settings:
    """A name that no other conversation has, and quiet logs unless asked otherwise."""
    name = settings.runtime.deployment or f"text-{os.getpid()}"
    level = settings.logging.level
    return replace(
        settings,
        runtime=replace(settings.runtime, deployment=name),
        logging=replace(
            settings.logging, level=QUIET_LOG_LEVEL if level == DEFAULT_LOG_LEVEL else level
        ),
    )


class CollectedTextReply(TextReply):
    """Text as it comes, and all of it afterwards."""

    def __init__(self, write: WriteText) -> None:
        self._write = write
        self.parts: list[str] = []

    def prompt(self, prompt_tokens: int) -> None:
        """Nothing to tell."""

    def begin(self, choice: int, started: Started) -> None:
        """Nothing to tell."""

    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        """Write it at once."""
        del choice, logprobs
        self._write(delta)
        self.parts.append(delta)
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        """Nothing to tell."""
