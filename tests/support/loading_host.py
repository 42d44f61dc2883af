"""A loader of models with processes, frontends and a clock that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.processes.child_spec import ChildSpec, MemoryNeed
from dynamo.runtime.processes.host_memory import HostMemory
from dynamo.runtime.processes.model_loader import ModelLoader
from dynamo.runtime.supervisors import IN_USE, WAITING

GB = 1 << 30
KEEP_ALIVE_S = 100.0
LONG_S = KEEP_ALIVE_S + 1


class Clock(SystemClock):
    """A clock that a test sets."""

    time = 0.0

    def now(self) -> float:
        return self.time


class Child:
    """A worker as its supervisor sees it."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.ready = self.sleeping = False
        self.desired, self.calls = True, 0
        self.crash_loop_reason = self.start_error = ""
        self.count_calls: Callable[[], int] = lambda: self.calls

    def request_calls(self) -> None:
        self.calls = self.count_calls()


class Processes:
    """Processes by model. A start is complete when the test says so, and so is a stop."""

    def __init__(self) -> None:
        self.children: list[Any] = []
        self.specs: dict[str, ChildSpec] = {}
        self.starts: dict[str, asyncio.Future[None]] = {}
        self.stops: dict[str, asyncio.Future[None]] = {}
        self.started: list[str] = []

    def specs_of_model(self, model: str) -> Sequence[ChildSpec]:
        return [self.specs[model]]

    async def start_model(self, specs: Sequence[ChildSpec], _: Callable[[str], None]) -> None:
        (spec,) = specs
        assert spec.model not in {child.spec.model for child in self.children}
        child = Child(spec)
        self.children.append(child)
        self.started.append(spec.model)
        self.starts[spec.model] = asyncio.get_running_loop().create_future()
        await self.starts[spec.model]
        child.ready = True

    async def stop_model(self, model: str, _: Callable[[str], None]) -> None:
        leaving = [child for child in self.children if child.spec.model == model]
        for child in leaving:
            child.desired = False
        self.stops[model] = asyncio.get_running_loop().create_future()
        await self.stops[model]
        self.children = [child for child in self.children if child not in leaving]


class Host:
    """A loader with its processes, frontends and clock."""

    def __init__(self, tasks: BackgroundTasks, limit_bytes: int = 0) -> None:
        self.clock, self.processes = Clock(), Processes()
        self.uses: dict[str, bytes] = {}
        self.changes = 0
        self.loader = ModelLoader(
            self.processes,
            HostMemory(limit_bytes),
            self.clock,
            tasks,
            lambda _: None,
            self._on_change,
        )

    def _on_change(self) -> None:
        self.changes += 1

    def add(self, name: str, *, memory: int = GB, keep_alive: float = KEEP_ALIVE_S) -> None:
        model = replace(Settings().model, load="on_demand", keep_alive=keep_alive, names=(name,))
        settings = replace(Settings(), model=model)
        need, worker = MemoryNeed(memory), f"{name}-worker"
        spec = ChildSpec(role="worker", name=worker, settings=settings, model=name, memory=need)
        self.processes.specs[name] = spec
        self.loader.add([spec])

    async def settle(self, passed_s: float = 0.0) -> None:
        self.clock.time += passed_s
        for _ in range(3):
            self.loader.settle()
            for _ in range(5):
                await asyncio.sleep(0)

    async def use(self, **uses: bytes | None) -> None:
        """Set the keys of a frontend for some models; None: it has no request."""
        for name, value in uses.items():
            self.uses.pop(f"{name}/frontend", None)
            if value is not None:
                self.uses[f"{name}/frontend"] = value
        self.loader.set_uses(self.uses)
        await self.settle()

    async def complete_start(self, name: str, load_s: float = 1.0) -> None:
        self.clock.time += load_s
        self.processes.starts[name].set_result(None)
        await self.settle()

    async def complete_stop(self, name: str) -> None:
        self.processes.stops.pop(name).set_result(None)
        await self.settle()

    async def load(self, name: str, then: bytes | None = None) -> None:
        """Load a model for a request. `then`: what the frontend tells when it is answered."""
        await self.use(**{name: WAITING})
        await self.complete_start(name)
        await self.use(**{name: then})

    def child(self, name: str) -> Child:
        (child,) = [child for child in self.processes.children if child.spec.model == name]
        assert isinstance(child, Child)
        return child

    @property
    def states(self) -> dict[str, str]:
        return {name: record.state for name, record in self.loader.records.items()}

    @property
    def leaving(self) -> set[str]:
        return set(self.processes.stops)


class Demand:
    """Requests that come for each model of a host again and again, while time passes in steps.
    `longest_s` is the longest time that one waited."""

    STEP_S, LOAD_S, STOP_S, ANSWER_S, PING_S = 0.05, 2.0, 0.4, 0.2, 0.5

    def __init__(self, host: Host, names: str) -> None:
        self._host, self._names = host, names
        self.longest_s = 0.0
        self.served = dict.fromkeys(names, 0)
        self._waiting_since: dict[str, float] = {}
        self._called_at = dict.fromkeys(names, -1.0)
        self._began: dict[asyncio.Future[None], float] = {}
        self._known = dict[str, str]()
        """The states as frontends know them, a step ago."""

    async def run(self, seconds: float) -> None:
        """Let time pass."""
        processes, clock = self._host.processes, self._host.clock
        for number in range(round(seconds / self.STEP_S)):
            known, self._known = self._known, self._host.states
            await self._host.use(**{name: self._send(name, known) for name in self._names})
            for waits, took_s in ((processes.starts, self.LOAD_S), (processes.stops, self.STOP_S)):
                for future in waits.values():
                    began = self._began.setdefault(future, clock.time - self.STEP_S)
                    if not future.done() and clock.time - began >= took_s - self.STEP_S / 2:
                        future.set_result(None)
            for child in processes.children:
                name = child.spec.model
                child.count_calls = lambda name=name: self._count_calls(name)
                if number % round(self.PING_S / self.STEP_S) == 0:
                    child.request_calls()
            await self._host.settle(self.STEP_S)

    def _send(self, name: str, known: dict[str, str]) -> bytes:
        now = self._host.clock.time
        if known.get(name) != "loaded":
            self._waiting_since.setdefault(name, now)
            return WAITING
        self.longest_s = max(self.longest_s, now - self._waiting_since.pop(name, now))
        self._called_at[name] = now
        self.served[name] += 1
        return IN_USE

    def _count_calls(self, name: str) -> int:
        return int(self._host.clock.time - self._called_at[name] < self.ANSWER_S)
