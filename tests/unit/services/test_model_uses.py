"""Requests for models that are loaded when they are wanted, as a frontend holds and reports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.application.gateway import Gateway, ServedModel
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, Overloaded
from dynamo.core.settings import Settings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import (
    IN_USE,
    WAITING,
    LoadRecord,
    SupervisorRecord,
    SupervisorView,
    uses_prefix,
)
from dynamo.services import model_uses
from dynamo.services.desired_models import DesiredModels
from dynamo.services.model_uses import ModelUses

NAMESPACE = Settings().runtime.namespace


class Records(SupervisorView):
    """The record of one supervisor, which a test sets."""

    def __init__(self) -> None:
        self.records: dict[str, SupervisorRecord] = {}
        self._listeners = []

    def set(self, **loads: LoadRecord) -> None:
        listed = dict.fromkeys(("always", *loads), ())
        self.records["s"] = SupervisorRecord(
            models=listed, namespace=NAMESPACE, on_demand=dict(loads)
        )
        self.notify()

    def notify(self) -> None:
        for listener in self._listeners:
            listener()


class Frontend:
    """The uses of a frontend whose supervisor a test plays."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime, self.gateway, self.records = runtime, Gateway(), Records()
        self.desired = DesiredModels(self.records, NAMESPACE)
        self.uses = ModelUses(runtime, self.gateway, self.desired)

    async def keys(self) -> Mapping[str, bytes]:
        prefix = uses_prefix(NAMESPACE)
        records = await self.runtime.discovery.get(prefix)
        return {key.removeprefix(prefix).partition("/")[0]: records[key] for key in records}

    async def until_keys(self, **expected: bytes) -> None:
        async with asyncio.timeout(10):
            while await self.keys() != expected:
                await asyncio.sleep(0.01)

    def open(self, name: str) -> None:
        self.gateway.add(ServedModel((name,), object(), 1, 100))


@pytest.fixture
async def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Frontend]:
    monkeypatch.setattr(model_uses, "LINGER_S", 0.0)
    settings = Settings()
    section = replace(settings.runtime, discovery=f"file:{tmp_path}")
    runtime = await DistributedRuntime.create(replace(settings, runtime=section))
    yield Frontend(runtime)
    await runtime.shutdown(0)


class Request:
    """A request that waits for its model and then goes on until it is ended."""

    def __init__(self, block: AbstractAsyncContextManager[None]) -> None:
        self._block, self._end = block, asyncio.Event()
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._block:
            self.began.set()
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task


async def test_a_request_waits_until_its_model_is_open_and_tells_supervisors(
    frontend: Frontend,
) -> None:
    frontend.records.set(a=LoadRecord())
    request = Request(frontend.uses.load("a", 60.0))
    await frontend.until_keys(a=WAITING)
    frontend.records.set(a=LoadRecord("loading"))
    await asyncio.sleep(0)
    assert not request.began.is_set()
    frontend.records.set(a=LoadRecord("loaded"))
    frontend.open("a")
    await request.began.wait()
    later = Request(frontend.uses.load("a", 60.0))
    await later.began.wait()
    await frontend.until_keys(a=WAITING)
    await request.end()
    await frontend.until_keys(a=IN_USE)
    await later.end()
    await frontend.until_keys()


async def test_a_load_that_takes_too_long_is_told_at_once_and_goes_on(frontend: Frontend) -> None:
    frontend.records.set(a=LoadRecord(load_s=90.0))
    request = Request(frontend.uses.load("a", 60.0))
    with pytest.raises(NoWorkers, match=r"takes 90.0 s: expected in 90.0 s; .* wait 30.0 s") as got:
        await request.task
    assert got.value.retry_after_s == pytest.approx(90.0, abs=1)
    await frontend.until_keys(a=WAITING)
    short = Request(frontend.uses.load("a", 2.0))
    with pytest.raises(NoWorkers, match=r"wait 2.0 s"):
        await short.task


async def test_a_request_waits_no_longer_than_its_limit(frontend: Frontend) -> None:
    frontend.records.set(a=LoadRecord(load_s=0.01))
    request = Request(frontend.uses.load("a", 0.6))
    with pytest.raises(NoWorkers, match=r"wait 0.6 s"):
        await request.task


async def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason(frontend: Frontend) -> None:
    frontend.records.set(a=LoadRecord("loading"))
    waiting = Request(frontend.uses.load("a", 60.0))
    await frontend.until_keys(a=WAITING)
    frontend.records.set(a=LoadRecord("failed", "no weights", backoff_s=4.0))
    with pytest.raises(NoWorkers, match="no weights") as got:
        await waiting.task
    assert got.value.retry_after_s == 4.0
    with pytest.raises(NoWorkers, match="no weights"):
        await Request(frontend.uses.load("a", 60.0)).task
    frontend.records.set(a=LoadRecord("failed", "no weights"))
    again = Request(frontend.uses.load("a", 60.0))
    await frontend.until_keys(a=WAITING)
    assert not again.task.done(), "it is tried again"
    again.task.cancel()


async def test_the_queue_has_a_bound(frontend: Frontend) -> None:
    settings = frontend.runtime.settings
    frontend.runtime.settings = replace(settings, router=replace(settings.router, queue_bound=1))
    frontend.records.set(a=LoadRecord())
    first = Request(frontend.uses.load("a", 60.0))
    await frontend.until_keys(a=WAITING)
    with pytest.raises(Overloaded, match="1 requests wait"):
        await Request(frontend.uses.load("a", 60.0)).task
    first.task.cancel()


@pytest.mark.parametrize("change", ["removed", "supervisor dead"])
async def test_a_model_that_will_not_be_loaded_is_not_waited_for(
    frontend: Frontend, change: str
) -> None:
    frontend.records.set(a=LoadRecord())
    request = Request(frontend.uses.load("a", 60.0))
    await frontend.until_keys(a=WAITING)
    if change == "removed":
        frontend.records.set()
    else:
        frontend.records.records.clear()
        frontend.records.notify()
    await request.began.wait()
    await request.end()


async def test_requests_for_a_leaving_model_wait_for_its_next_load(frontend: Frontend) -> None:
    sent = asyncio.Event()

    async def send(*_: Any) -> None:
        sent.set()

    frontend.records.set(a=LoadRecord("loaded"))
    tracked = frontend.uses.track("a", send)
    any_request: Any = None
    await tracked(any_request, Context("1"), any_request)
    assert sent.is_set()
    sent.clear()
    frontend.records.set(a=LoadRecord("leaving"))
    waiting = asyncio.create_task(tracked(any_request, Context("2"), any_request))
    await frontend.until_keys(a=WAITING)
    assert not sent.is_set()
    frontend.records.set(a=LoadRecord("unloaded"))
    await waiting
    assert sent.is_set(), "admission holds it now"


async def test_requests_for_other_models_are_not_tracked(frontend: Frontend) -> None:
    send: Callable[..., Any] = lambda *_: None  # noqa: E731
    frontend.records.set(a=LoadRecord())
    assert frontend.uses.track("always", send) is send
    assert frontend.uses.predict("always") is None


async def test_no_timer_runs_on_after_the_last_request(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = 0
    call_at = frontend.runtime.clock.call_at

    def count_timers(when: float, callback: Callable[[], None]) -> object:
        nonlocal timers
        timers += 1
        return call_at(when, callback)

    monkeypatch.setattr(model_uses, "LINGER_S", 0.01)
    monkeypatch.setattr(frontend.runtime.clock, "call_at", count_timers)
    frontend.records.set(a=LoadRecord("loaded"))
    async with frontend.uses.hold("a", 60.0, lambda: True):
        await frontend.until_keys(a=IN_USE)
    await frontend.until_keys()
    started = timers
    for _ in range(100):
        await asyncio.sleep(0)
    assert timers == started
