"""Models that are loaded when they are wanted: when they are loaded, and which makes room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.processes.child_spec import ChildSpec, MemoryNeed
from dynamo.runtime.processes.host_memory import HostMemory
from dynamo.runtime.processes.model_loader import QUIET_S, ModelLoader
from dynamo.runtime.supervisors import IN_USE, WAITING, LoadRecord

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


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    async with BackgroundTasks() as owner:
        yield owner


@pytest.fixture
async def roomy(tasks: BackgroundTasks) -> Host:
    return Host(tasks)


@pytest.fixture
async def small(tasks: BackgroundTasks) -> Host:
    """A host with room for one of two models, `a` and `b`."""
    host = Host(tasks, limit_bytes=GB)
    host.add("a")
    host.add("b")
    return host


async def test_a_model_is_loaded_once_when_it_is_wanted_and_leaves_when_it_was_idle(
    roomy: Host,
) -> None:
    roomy.add("a")
    await roomy.settle(LONG_S)
    assert (roomy.states, roomy.processes.started) == ({"a": "unloaded"}, [])
    roomy.uses["a/other"] = WAITING
    await roomy.use(a=WAITING)
    assert roomy.states == {"a": "loading"}
    await roomy.complete_start("a", load_s=2.5)
    assert roomy.loader.records["a"] == LoadRecord("loaded", load_s=2.5)
    del roomy.uses["a/other"]
    await roomy.use(a=None)
    await roomy.settle(KEEP_ALIVE_S / 2)
    await roomy.use(a=IN_USE)
    await roomy.use(a=None)
    await roomy.settle(KEEP_ALIVE_S / 2)
    assert roomy.leaving == set(), "it was used since"
    await roomy.settle(KEEP_ALIVE_S / 2)
    await roomy.complete_stop("a")
    assert (roomy.states, roomy.processes.children) == ({"a": "unloaded"}, [])
    assert roomy.processes.started == ["a"]


async def test_a_model_stays_while_a_frontend_or_a_worker_has_a_request(roomy: Host) -> None:
    roomy.add("a", keep_alive=0.0)
    await roomy.load("a", then=IN_USE)
    await roomy.settle(LONG_S)
    roomy.child("a").calls = 1
    await roomy.use(a=None)
    await roomy.settle(LONG_S)
    assert roomy.leaving == set()
    roomy.child("a").calls = 0
    await roomy.settle(0.1)
    assert roomy.leaving == {"a"}


async def test_without_time_to_stay_a_model_serves_the_request_that_caused_its_load(
    roomy: Host,
) -> None:
    roomy.add("a", keep_alive=0.0)
    await roomy.use(a=WAITING)
    await roomy.complete_start("a")
    await roomy.settle(LONG_S)
    assert roomy.leaving == set(), "the request has not come yet"
    await roomy.use(a=None)
    await roomy.settle(0.1)
    assert roomy.leaving == {"a"}


async def test_a_request_for_a_leaving_model_loads_it_again(roomy: Host) -> None:
    roomy.add("a", keep_alive=0.0)
    await roomy.load("a")
    await roomy.settle(0.1)
    await roomy.use(a=WAITING)
    assert roomy.processes.started == ["a"]
    await roomy.complete_stop("a")
    assert roomy.processes.started == ["a", "a"]


async def test_the_model_that_was_used_least_recently_makes_room(tasks: BackgroundTasks) -> None:
    host = Host(tasks, limit_bytes=3 * GB)
    for name in "abcd":
        host.add(name)
    for name in "abc":
        await host.load(name)
        await host.settle(1.0)
    await host.use(a=IN_USE)
    await host.use(a=None)
    await host.settle(1.0)
    await host.use(d=WAITING)
    assert host.leaving == {"b"}
    await host.complete_stop("b")
    assert host.states == {"a": "loaded", "b": "unloaded", "c": "loaded", "d": "loading"}


async def test_room_is_counted_in_bytes(tasks: BackgroundTasks) -> None:
    host = Host(tasks, limit_bytes=4 * GB)
    for name, size in (("a", GB), ("b", GB), ("c", GB), ("big", 3 * GB)):
        host.add(name, memory=size)
    for name in "abc":
        await host.load(name)
        await host.settle(1.0)
    assert host.leaving == set(), "three small ones fit"
    await host.use(big=WAITING)
    assert host.leaving == {"a", "b"}, "two have to leave for a large one"
    await host.complete_stop("a")
    assert host.states["big"] == "unloaded"
    await host.complete_stop("b")
    assert host.states == {"a": "unloaded", "b": "unloaded", "c": "loaded", "big": "loading"}


async def test_a_model_that_answers_is_not_stopped_for_another_one(small: Host) -> None:
    await small.load("a", then=IN_USE)
    small.child("a").calls = 1
    await small.use(b=WAITING)
    await small.settle(LONG_S)
    assert small.states["a"] == "leaving", "it gets no further requests"
    await small.settle(LONG_S)
    assert small.leaving == set(), "it still answers"
    assert "1024 MiB" in small.loader.records["b"].reason
    small.child("a").calls = 0
    await small.settle(QUIET_S / 2)
    assert small.leaving == set(), "a frontend may have sent one before it knew"
    await small.settle(QUIET_S)
    assert small.leaving == {"a"}
    await small.complete_stop("a")
    assert small.states["b"] == "loading"


async def test_a_model_that_loads_is_not_stopped_for_another_one(small: Host) -> None:
    await small.use(a=WAITING)
    await small.use(a=None)
    await small.use(b=WAITING)
    await small.settle(LONG_S)
    assert (small.leaving, small.states["b"]) == (set(), "unloaded")
    await small.complete_start("a")
    await small.settle(0.1)
    assert small.leaving == {"a"}, "nobody waits for it any more"


async def test_a_model_is_not_stopped_before_the_request_that_caused_its_load(small: Host) -> None:
    await small.use(a=WAITING, b=WAITING)
    assert small.processes.started == ["a"]
    await small.complete_start("a")
    await small.settle(LONG_S)
    assert (small.leaving, small.states["a"]) == (set(), "loaded")
    await small.use(a=IN_USE)
    assert small.states["a"] == "leaving"


async def test_two_wanted_at_once_are_both_loaded_where_both_fit(roomy: Host) -> None:
    roomy.add("a")
    roomy.add("b")
    await roomy.use(a=WAITING, b=WAITING)
    assert sorted(roomy.processes.started) == ["a", "b"]
    await roomy.complete_start("b")
    await roomy.complete_start("a")
    assert roomy.states == {"a": "loaded", "b": "loaded"}


async def test_two_in_demand_take_turns_and_each_serves_its_queue(small: Host) -> None:
    await small.use(a=WAITING, b=WAITING)
    for name, other in (("a", "b"), ("b", "a"), ("a", "b")):
        await small.complete_start(name, load_s=2.0)
        await small.settle(LONG_S)
        assert small.states == {name: "loaded", other: "unloaded"}, "its queue is not served"
        await small.use(**{name: IN_USE})
        await small.settle(2 * QUIET_S)
        await small.use(**{name: WAITING})
        await small.complete_stop(name)
    assert small.processes.started == ["a", "b", "a", "b"]


async def test_a_model_in_demand_runs_for_as_long_as_its_load_took(small: Host) -> None:
    await small.use(a=WAITING)
    await small.complete_start("a", load_s=20.0)
    await small.use(a=IN_USE, b=WAITING)
    await small.settle(19.0)
    assert small.states["a"] == "loaded"
    await small.settle(1.0)
    assert small.states["a"] == "leaving"


async def test_a_model_stays_when_the_one_that_waited_for_it_is_wanted_no_more(small: Host) -> None:
    await small.load("a", then=IN_USE)
    small.child("a").calls = 1
    await small.use(b=WAITING)
    await small.settle(LONG_S)
    assert small.states["a"] == "leaving"
    await small.use(b=None)
    assert small.states == {"a": "loaded", "b": "unloaded"}


async def test_a_model_that_cannot_be_loaded_is_tried_again_later_and_harms_none(
    roomy: Host,
) -> None:
    roomy.add("a")
    roomy.add("b")
    await roomy.load("b", then=IN_USE)
    await roomy.use(a=WAITING)
    roomy.processes.starts["a"].set_exception(ModelUnavailable("no weights"))
    await roomy.settle()
    await roomy.complete_stop("a")
    record = roomy.loader.records["a"]
    assert (record.state, record.reason, record.backoff_s) == ("failed", "no weights", 2.0)
    await roomy.settle(1.0)
    assert roomy.processes.started == ["b", "a"]
    await roomy.settle(1.0)
    assert roomy.processes.started == ["b", "a", "a"]
    roomy.processes.starts["a"].set_exception(ModelUnavailable("no weights"))
    await roomy.settle()
    await roomy.complete_stop("a")
    assert roomy.loader.records["a"].backoff_s == 4.0
    await roomy.use(a=None)
    await roomy.settle(4.0)
    assert roomy.loader.records["a"] == LoadRecord("failed", "no weights")
    assert roomy.processes.started == ["b", "a", "a"], "nobody asks for it"
    await roomy.use(a=WAITING)
    await roomy.complete_start("a")
    assert roomy.states == {"a": "loaded", "b": "loaded"}


async def test_a_worker_that_dies_again_and_again_fails_its_model(roomy: Host) -> None:
    roomy.add("a")
    await roomy.load("a", then=IN_USE)
    child = roomy.child("a")
    child.ready, child.crash_loop_reason = False, "died 5 times"
    await roomy.settle()
    await roomy.complete_stop("a")
    assert roomy.loader.records["a"].reason == "died 5 times"


async def test_a_model_that_never_fits_is_refused_with_the_numbers(small: Host) -> None:
    await small.load("a")
    small.add("big", memory=5 * GB)
    await small.use(big=WAITING)
    record = small.loader.records["big"]
    assert record.state == "failed"
    assert "need 5120 MiB" in record.reason
    assert "0 MiB of the 1024 MiB for workers" in record.reason
    assert small.leaving == set(), "no other one had to go"


async def test_a_removed_model_is_not_loaded(roomy: Host) -> None:
    roomy.add("a")
    roomy.loader.forget("a")
    await roomy.use(a=WAITING)
    assert (roomy.processes.started, roomy.states) == ([], {})


async def test_a_model_waits_for_the_memory_of_one_that_is_removed(small: Host) -> None:
    await small.load("a", then=IN_USE)
    small.loader.forget("a")  # its workers drain
    await small.use(a=None, b=WAITING)
    assert small.states == {"b": "unloaded"}
    small.child("a").desired = False
    await small.settle(1.0)
    assert small.states == {"b": "unloaded"}
    small.processes.children.clear()
    await small.settle()
    await small.complete_start("b")
    assert small.states == {"b": "loaded"}
