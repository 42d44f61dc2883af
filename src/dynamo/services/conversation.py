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
from dynamo.application.gateway import DEFAULT
from dynamo.core.context import Context
from dynamo.core.settings import Settings
from dynamo.core.tasks import Tasks
from dynamo.core.text import ChatRequest, TextFinish, TextReply, TokenText
from dynamo.core.values import Started
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisor import Supervisor
from dynamo.services.launch import deployment_specs
from dynamo.services.models import Models
from dynamo.services.routing import Routing
from dynamo.services.way import WORKER
from dynamo.telemetry.logs import set_levels

Write = Callable[[str], None]
Lines = Callable[[], AsyncGenerator[str, None]]
"""Called once when a model is ready; what the user says, a message each."""

DEFAULT_LEVEL = "info"
QUIET_LEVEL = "warn"


async def converse(
    settings: Settings, lines: Lines, write: Write, logs: TextIO = sys.stderr
) -> int:
    """Answer every message of `lines`, with what was said before it, until they end. Returns the
    exit code. Raises what an answer raises, and what keeps a worker from ever starting."""
    settings = _own_deployment(settings)
    set_levels(settings.logging.level)
    specs = [spec for spec in deployment_specs(settings) if spec.role == WORKER]
    supervisor = Supervisor(specs, deployment_of(settings), settings, out=logs)
    async with Tasks(on_failure=lambda _: None) as tasks:  # both results are taken below
        ends = tasks.start(supervisor.run(), "supervisor")
        talk = tasks.start(_talk(settings, lines, write), "conversation")
        stopped = tasks.start(supervisor.stopping.wait(), "stopped")  # Ctrl-C ends an answer, too
        await asyncio.wait([ends, talk, stopped], return_when=asyncio.FIRST_COMPLETED)
        talk.cancel()
        await asyncio.wait([talk])
        if not supervisor.stopping.is_set():
            supervisor.stop()
        code = await ends
    if supervisor.failure is not None:
        raise supervisor.failure.error()
    if not talk.cancelled():
        talk.result()
    return code


async def _talk(settings: Settings, lines: Lines, write: Write) -> None:
    async with await DistributedRuntime.create(settings, role="console") as runtime:
        gateway = Gateway()
        Models(runtime, gateway, Routing(runtime)).follow()
        await _until_well(runtime)
        said: list[dict[str, str]] = []
        async with aclosing(lines()) as messages:
            async for message in messages:
                said.append({"role": "user", "content": message})
                said.append({"role": "assistant", "content": await _answer(gateway, said, write)})


async def _answer(gateway: Gateway, said: Sequence[dict[str, str]], write: Write) -> str:
    name, served = gateway.find(DEFAULT)
    reply = Spoken(write)
    request = ChatRequest(model=name, messages=tuple(said))
    try:
        await served.processor.chat(request, Context(request_id=secrets.token_hex(8)), reply)
    finally:
        write("\n")
    return "".join(reply.parts)


async def _until_well(runtime: DistributedRuntime) -> None:
    changed = asyncio.Event()
    runtime.health.on_change(changed.set)
    while not runtime.health.well:
        changed.clear()
        await changed.wait()


def _own_deployment(settings: Settings) -> Settings:
    """A name that no other conversation has, and quiet logs unless asked otherwise."""
    name = settings.runtime.deployment or f"text-{os.getpid()}"
    level = settings.logging.level
    return replace(
        settings,
        runtime=replace(settings.runtime, deployment=name),
        logging=replace(settings.logging, level=QUIET_LEVEL if level == DEFAULT_LEVEL else level),
    )


class Spoken(TextReply):
    """Text as it comes, and all of it afterwards."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.parts: list[str] = []

    def prompt(self, prompt_tokens: int) -> None:
        """Nothing to tell."""

    def begin(self, choice: int, started: Started) -> None:
        """Nothing to tell."""

    def text(self, choice: int, delta: str, logprobs: Sequence[TokenText] | None = None) -> bool:
        """Write it at once."""
        del choice, logprobs
        self._write(delta)
        self.parts.append(delta)
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        """Nothing to tell."""
