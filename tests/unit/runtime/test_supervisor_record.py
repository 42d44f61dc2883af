"""The record of a supervisor in discovery: the workers that it keeps running."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest

from dynamo.communication.discovery import Discovery, RecordChange, open_discovery
from dynamo.core.clock import SystemClock
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import Deployment, add_waiting_children
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.runtime.supervisors import (
    SUPERVISORS_PREFIX,
    KindRecord,
    SupervisorRecord,
    SupervisorView,
)

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]
SERVE = 'tell(state="ready"); signal.pause()'


async def until_records(
    plane: Discovery, condition: Callable[[list[SupervisorRecord]], object]
) -> None:
    async with asyncio.timeout(20):
        while True:
            values = (await plane.get(SUPERVISORS_PREFIX)).values()
            if condition([msgspec.json.decode(x, type=SupervisorRecord) for x in values]):
                return
            await asyncio.sleep(0.01)


async def test_the_record_follows_starts_deaths_and_stops(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    supervisor = supervise(
        spec("time.sleep(0.3); " + SERVE, "worker-1"),
        spec(SERVE, "worker-2"),
        spec(SERVE, "frontend", role="frontend"),
    )
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        plane = await open_discovery(deployment.discovery_url)
        await until_records(plane, lambda seen: [x.desired for x in seen] == [{"worker": 2}])
        await supervisor.ready.wait()
        await until_records(plane, lambda seen: 0 < seen[0].start_s["worker"] < 20)
        first = supervisor.children[0].pid
        os.kill(first, signal.SIGKILL)
        two = KindRecord(ready=2, gpus=1, role="both")
        await until_records(plane, lambda seen: seen[0].kinds == {"worker": two})
        for count in (1, 0):
            await supervisor._group.scale("worker", count, lambda _: None)
            expected = {"worker": count} if count else {}
            await until_records(plane, lambda seen, e=expected: seen[0].desired == e)
        none = KindRecord(gpus=1, role="both")  # may grow again
        await until_records(plane, lambda seen: seen[0].kinds == {"worker": none})
        supervisor.stop()
        assert await running == 0
        assert await plane.get(SUPERVISORS_PREFIX) == {}
        await plane.close()


async def test_a_sleeping_worker_is_desired_healthy_and_no_capacity(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    script = 'tell(state="ready"); time.sleep(0.3); tell(state="sleeping"); signal.pause()'
    supervisor = supervise(spec(script, "worker"))
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        plane = await open_discovery(deployment.discovery_url)
        kind = KindRecord(sleeping=1, gpus=1, role="both")
        await until_records(plane, lambda seen: seen and seen[0].kinds == {"worker": kind})
        await until_records(plane, lambda seen: seen[0].desired == {"worker": 1})
        assert supervisor.children[0].unhealthy_reason == ""
        supervisor.stop()
        assert await running == 0
        await plane.close()


async def test_a_process_that_waits_for_its_restart_keeps_its_row(
    spec: Spec, supervise: Supervise, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime.processes.restart_backoff.RESTART_DELAY_S", 1000.0)
    supervisor = supervise(spec(SERVE, "worker-1"))
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        assert len(add_waiting_children(deployment.live_processes())) == 1
        os.kill(supervisor.children[0].pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while len(rows := add_waiting_children(deployment.live_processes())) == 1:
                await asyncio.sleep(0.01)
        row = rows[-1]
        assert (row.name, row.role, row.pid) == ("worker-1", "worker", 0)
        assert (row.state, row.restarts) == ("restarting", 1)
        assert "SIGKILL" in row.reason
        supervisor.stop()
        assert await running == 0


async def test_a_crash_loop_is_announced(
    spec: Spec, supervise: Supervise, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime.processes.restart_backoff.RESTART_DELAY_S", 0.001)
    supervisor = supervise(spec("sys.exit(7)", "worker"))
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        plane = await open_discovery(deployment.discovery_url)
        await until_records(plane, lambda seen: seen and seen[0].failing)
        await until_records(plane, lambda seen: "exit 7" in seen[0].failing["worker"])
        await until_records(plane, lambda seen: seen[0].desired == {})
        supervisor.stop()
        await running
        await plane.close()


async def test_a_view_follows_records_and_skips_bad_ones(tmp_path: Path) -> None:
    plane = await open_discovery(f"file:{tmp_path}")
    view = SupervisorView(plane, SystemClock())
    async with BackgroundTasks() as tasks:
        watch = tasks.start(view.follow())
        await plane.put(SUPERVISORS_PREFIX + "bad", b"[")
        await plane.put(SUPERVISORS_PREFIX + "good", b'{"desired": {"worker": 3}, "later": 1}')
        async with asyncio.timeout(20):
            while view.records != {"good": SupervisorRecord({"worker": 3})}:
                await asyncio.sleep(0.01)
            await plane.delete(SUPERVISORS_PREFIX + "good")
            while view.records:
                await asyncio.sleep(0.01)
        watch.cancel()
    await plane.close()


async def test_records_stay_until_a_new_watch_has_its_first_batch() -> None:
    batches: asyncio.Queue[list[RecordChange]] = asyncio.Queue()
    begun: list[str] = []

    class RestartedWatch:
        @asynccontextmanager
        async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[RecordChange]]]:
            async def one_batch() -> AsyncIterator[list[RecordChange]]:
                yield await batches.get()

            begun.append(prefix)
            yield one_batch()

    record = RecordChange(SUPERVISORS_PREFIX + "first", b'{"desired": {"worker": 3}}')
    view = SupervisorView(cast("Discovery", RestartedWatch()), SystemClock())
    async with BackgroundTasks() as tasks, asyncio.timeout(20):
        tasks.start(view.follow())
        batches.put_nowait([record])
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        assert view.records == {"first": SupervisorRecord({"worker": 3})}
        batches.put_nowait([])
        while view.records:
            await asyncio.sleep(0.01)
