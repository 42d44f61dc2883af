"""Admission over fake workers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.labels import LABELS_KEY
from dynamo.core.reply import Reply
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    Load,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.supervisors import SUPERVISOR_KEY, SupervisorRecord, SupervisorView
from dynamo.scheduling.admission import Admission, WorkerStarts
from dynamo.scheduling.router.attempt import Attempt
from dynamo.scheduling.router.features import excluded_workers
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.telemetry import Registry
from dynamo.testing.fakes import CollectedReply

SUPERVISOR = "s1"


def make_worker(name: str, slots: int, **labels: str) -> Instance:
    info = msgspec.to_builtins(EngineInfo("mock", 16, 4096, 65_536, slots, 8192))
    capabilities = {"engine": info, LABELS_KEY: labels, SUPERVISOR_KEY: SUPERVISOR + "/worker"}
    return Instance(name, f"memory:{name}", "n", "c", "e", capabilities)


class FakeCluster:
    """Admission, a client with workers "a", "b", ... of the given slots, and a router behind it.

    The router sends a request to the first worker that is not avoided, which takes `duration_s`.
    Until `hold` is set the router chooses no worker. With `error` it fails before the choice.
    `attempts` lists (request id, worker) in order. `announce` sets the record of the workers'
    supervisor.
    """

    def __init__(
        self, clock: VirtualClock, tasks: BackgroundTasks, limits: RouterSettings, slots: list[int]
    ) -> None:
        self.clock, self.tasks = clock, tasks
        self.instances = {
            name: make_worker(name, count, zone=name)
            for name, count in zip("abcd", slots, strict=False)
        }
        self.listeners: list[Callable[[], None]] = []
        self.duration_s = 1.0
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None
        self.absent: set[str] = set()
        self.attempts: list[tuple[str, str]] = []
        self.contexts: list[Context] = []
        self.metrics = Registry()
        client: Any = self
        self.view = self
        self.rejected: dict[str, Instance] = {}
        self.removal_listeners: list[Callable[[Instance], object]] = []
        self.supervisors = SupervisorView(client, clock)
        self.starts = WorkerStarts(client, self.supervisors, clock)
        self.ledger = Ledger(clock, client)
        self.admission = Admission(
            client, self.ledger, None, clock, limits, self.metrics, self.starts
        )

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def count_by(self, count_requests: Callable[[str], int]) -> None:
        pass

    def on_instance_removed(self, callback: Callable[[Instance], object]) -> Callable[[], None]:
        self.removal_listeners.append(callback)
        return lambda: self.removal_listeners.remove(callback)

    def announce(
        self, desired: int, start_s: float | None = None, failing: str = "", kind: str = "worker"
    ) -> None:
        self.supervisors.records[SUPERVISOR] = SupervisorRecord(
            {kind: desired} if desired else {},
            {kind: start_s} if start_s else {},
            {kind: failing} if failing else {},
        )

    def report(self, worker: str, load: Load) -> None:
        for reader in (self.ledger, self.admission):
            reader.on_load_report(worker, load, self.clock.now())

    def set_instances(self, **instances: Instance) -> None:
        before, self.instances = self.instances, instances
        for listener in self.listeners:
            listener()
        for name in before.keys() - instances.keys() - self.rejected.keys():
            for removed in self.removal_listeners:
                removed(before[name])

    async def route(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.contexts.append(context)
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        excluded = excluded_workers(self.instances, context)
        avoided = {*context.avoid, *self.absent, *excluded}
        names = [name for name in self.instances if name not in avoided]
        if not names:
            raise NoWorkers("no worker")
        worker = self.ledger.workers.at(self.instances[names[0]], None)
        placed = self.ledger.place(
            f"{request.request_id}/{request.choice}/0",
            worker,
            Prompt(len(request.token_ids) // TOKEN_BYTES, ()),
            new_tokens=len(request.token_ids) // TOKEN_BYTES,
            max_tokens=request.stops.max_tokens,
        )
        attempt = Attempt(reply, placed, self.ledger)
        error: BaseException | None = None
        try:
            self.attempts.append((request.request_id, names[0]))
            attempt.begin(Started(names[0], prompt_tokens=4))
            attempt.tokens((1,))
            await self.clock.sleep(self.duration_s)
            attempt.finish(Finish("stop", 10))
        except BaseException as failure:
            error = failure
            raise
        finally:
            self.ledger.end(placed, error)

    def start(
        self, name: str, timeout_s: float | None = None, **metadata: str
    ) -> asyncio.Task[None]:
        """Send a request with that id in a task."""
        request = GenerateRequest(name, "m", bytes(16), SamplingParams(), StopConditions(10))
        context = Context(name, timeout_s=timeout_s, metadata=metadata)
        call = self.admission.send(request, context, CollectedReply(), self.route)
        return self.tasks.start(call, name)

    async def learn_duration(self, duration_s: float) -> None:
        """Serve eight requests of that duration, so that admission predicts it."""
        self.duration_s = duration_s
        for number in range(8):
            await self.start(f"before{number}")
        self.attempts.clear()

    @property
    def served(self) -> list[str]:
        """The requests that reached a worker, in order."""
        return [name for name, _ in self.attempts]


def run_scenario(
    scenario: Callable[[FakeCluster], Awaitable[None]],
    *slots: int,
    limits: RouterSettings | None = None,
) -> None:
    """Run a scenario on a cluster of workers with these slots."""

    async def main(clock: VirtualClock) -> None:
        async with BackgroundTasks(on_failure=lambda _: None) as tasks:
            await scenario(FakeCluster(clock, tasks, limits or RouterSettings(), [*slots]))

    run_in_virtual_time(main)
