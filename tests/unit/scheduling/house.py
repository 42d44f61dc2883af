"""Admission over made-up workers, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.reply import Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission import Admission, SloLimits
from dynamo.scheduling.router.labels import LABELS_KEY
from dynamo.telemetry import Registry
from dynamo.testing.fakes import CollectedReply


def worker(name: str, seqs: int, **labels: str) -> Instance:
    info = msgspec.to_builtins(EngineInfo("mock", 16, 4096, 65_536, seqs, 8192))
    return Instance(name, f"memory:{name}", "n", "c", "e", {"engine": info, LABELS_KEY: labels})


class House:
    """Workers "a", "b", ... with so many places each, and what stands below admission: it takes the
    first worker that is not to be avoided, for `took_s`. `hold`: it chooses nobody before that is
    set; `fails`: it fails before it chooses. `begun`: who is at which worker, in order."""

    def __init__(
        self, clock: VirtualClock, tasks: BackgroundTasks, promise: SloLimits, seqs: list[int]
    ) -> None:
        self.clock, self.tasks = clock, tasks
        self.instances = {
            name: worker(name, places, zone=name)
            for name, places in zip("abcd", seqs, strict=False)
        }
        self.listeners: list[Callable[[], None]] = []
        self.took_s = 1.0
        self.hold: asyncio.Event | None = None
        self.fails: Exception | None = None
        self.absent: set[str] = set()
        self.begun: list[tuple[str, str]] = []
        self.contexts: list[Context] = []
        self.metrics = Registry()
        client: Any = self
        self.admission = Admission(client, None, clock, promise, self.metrics)

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def change(self, **instances: Instance) -> None:
        """These are the workers now."""
        self.instances = instances
        for listener in self.listeners:
            listener()

    async def below(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.contexts.append(context)
        if self.hold is not None:
            await self.hold.wait()
        if self.fails is not None:
            raise self.fails
        names = [one for one in self.instances if one not in {*context.avoid, *self.absent}]
        if not names:
            raise NoWorkers("nobody")
        follower = self.admission.track_attempt(self.instances[names[0]], request)
        error: BaseException | None = None
        try:
            self.begun.append((request.request_id, names[0]))
            follower.on_started(Started(names[0], prompt_tokens=4))
            follower.on_first_token()
            await self.clock.sleep(self.took_s)
            follower.on_finished(Finish("stop", 10))
        except BaseException as left:
            error = left
            raise
        finally:
            follower.on_ended(error)

    def ask(self, name: str, timeout_s: float | None = None, **metadata: str) -> asyncio.Task[None]:
        request = GenerateRequest(name, "m", bytes(16), SamplingParams(), StopConditions(10))
        context = Context(name, timeout_s=timeout_s, metadata=metadata)
        below = self.admission.send(request, context, CollectedReply(), self.below)
        return self.tasks.start(below, name)

    async def learn(self, took_s: float) -> None:
        """Answers take so long."""
        self.took_s = took_s
        for number in range(8):
            await self.ask(f"before{number}")
        self.begun.clear()

    @property
    def taken(self) -> list[str]:
        return [name for name, _ in self.begun]


def play(
    what: Callable[[House], Awaitable[None]], *seqs: int, promise: SloLimits | None = None
) -> None:
    async def main(clock: VirtualClock) -> None:
        async with BackgroundTasks(on_failure=lambda _: None) as tasks:
            await what(House(clock, tasks, promise or SloLimits(), [*seqs]))

    run_in_virtual_time(main)
