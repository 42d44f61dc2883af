"""Standby processes with tiny children: they take the place of processes that die."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace
from tests.support.supervisors import control, serving

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.control import ControlRequest, send_control_request
from dynamo.runtime.processes.process_record import describe_workers
from dynamo.runtime.processes.standby import with_standbys
from dynamo.runtime.processes.supervisor import Supervisor

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]

WORKER = """
role = lambda settings: settings["engine"].get("role", "both")
say = lambda *words: print(*words, flush=True)
if start.get("standby"):
    tell(state="standby")
    place = ""
    while not place:
        for line in os.read(0, 1 << 20).splitlines():
            notice = json.loads(line)
            if notice != "ping" and notice.get("place"):
                place, settings = notice["place"], notice["settings"]
    say("takes", place, role(settings))
else:
    say("starts", start["name"], role(start["settings"]))
"""
SERVE = 'tell(state="ready"); signal.pause()'
SERVE_AS_PREFILL = 'tell(state="ready", worker_role="prefill"); signal.pause()'


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def child_called(supervisor: Supervisor, name: str) -> ChildProcess:
    return next(child for child in supervisor.children if child.spec.name == name)


def stands_by(supervisor: Supervisor) -> bool:
    """Whether every standby process has loaded its model."""
    standbys = [child for child in supervisor.children if child.spec.standby]
    return all(child.pid and child.report.state == "standby" for child in standbys)


def specs_of(
    spec: Spec, script: str = SERVE, workers: int = 2, **engine: object
) -> list[ChildSpec]:
    settings = replace(Settings(), engine=replace(EngineSettings(), **{"standby": 1} | engine))
    names = [f"worker-{number}" for number in range(1, workers + 1)]
    return with_standbys(
        [replace(spec(WORKER + script, name), settings=settings) for name in names]
    )


async def kill(supervisor: Supervisor, name: str) -> None:
    """Kill a process and wait until its place serves again and the next one stands by."""
    child = child_called(supervisor, name)
    restarts = child.restarts
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: child_called(supervisor, name).restarts > restarts)
    await until(lambda: child_called(supervisor, name).ready)
    await until(lambda: stands_by(supervisor))


async def play(supervisor: Supervisor, *killed: str) -> None:
    """Kill processes one after the other, and stop."""
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        await until(lambda: stands_by(supervisor))
        for name in killed:
            await kill(supervisor, name)
        supervisor.stop()
        await running


def lines(out: io.StringIO, word: str) -> Sequence[str]:
    return [line.partition("| ")[2] for line in out.getvalue().splitlines() if f"| {word}" in line]


async def test_a_standby_process_takes_the_place_of_each_that_dies(
    spec: Spec, supervise: Supervise
) -> None:
    out = io.StringIO()
    supervisor = supervise(*specs_of(spec), out=out)
    await play(supervisor, "worker-2", "worker-2", "worker-1")
    assert sorted(lines(out, "starts")) == ["starts worker-1 both", "starts worker-2 both"]
    assert lines(out, "takes") == [f"takes worker-{number} both" for number in (2, 2, 1)]
    names = sorted(child.spec.name for child in supervisor.children)
    assert names == ["worker-1", "worker-2", "worker-standby-1"]
    assert child_called(supervisor, "worker-2").restarts == 2
    assert child_called(supervisor, "worker-2").last_exit == "SIGKILL"


async def test_it_takes_the_role_that_an_order_gave(spec: Spec, supervise: Supervise) -> None:
    out = io.StringIO()
    supervisor = supervise(*specs_of(spec, SERVE_AS_PREFILL, workers=1, standby=0), out=out)
    await play(supervisor, "worker-1")
    assert lines(out, "starts") == ["starts worker-1 both", "starts worker-1 prefill"]
    out = io.StringIO()
    supervisor = supervise(*specs_of(spec, SERVE_AS_PREFILL, workers=1), out=out)
    await play(supervisor, "worker-1", "worker-1")
    assert lines(out, "takes") == ["takes worker-1 prefill"] * 2


async def test_a_process_that_dies_before_it_serves_uses_no_standby(
    spec: Spec, supervise: Supervise
) -> None:
    dies = replace(spec("time.sleep(0)", "worker-1"), settings=specs_of(spec)[0].settings)
    standby = specs_of(spec)[-1]
    supervisor = supervise(dies, standby)
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await until(lambda: stands_by(supervisor))
        await until(lambda: child_called(supervisor, "worker-1").restarts > 2)
        assert child_called(supervisor, "worker-standby-1").report.state == "standby"
        supervisor.stop()
        await running


async def test_it_does_not_take_the_place_of_other_settings(
    spec: Spec, supervise: Supervise
) -> None:
    out = io.StringIO()
    worker, standby = specs_of(spec, workers=1)
    other = replace(standby.settings, engine=replace(standby.settings.engine, block_size=32))
    await play(supervise(worker, replace(standby, settings=other), out=out), "worker-1")
    assert lines(out, "takes") == []


async def test_a_restart_renews_it_too(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    supervisor = supervise(*specs_of(spec, workers=1))
    async with serving(supervisor):
        await until(lambda: stands_by(supervisor))
        before = child_called(supervisor, "worker-standby-1").pid
        await control(deployment, "restart", "worker")
        await until(
            lambda: (
                stands_by(supervisor) and child_called(supervisor, "worker-standby-1").pid != before
            )
        )
        before = child_called(supervisor, "worker-standby-1").pid
        await control(deployment, "restart", "worker-1")
        await until(lambda: child_called(supervisor, "worker-standby-1").pid not in {0, before})


async def test_each_process_keeps_its_devices(spec: Spec, supervise: Supervise) -> None:
    worker, standby = specs_of(spec, workers=1)
    supervisor = supervise(replace(worker, cards=("0",)), replace(standby, cards=("1",)))
    await play(supervisor, "worker-1")
    assert child_called(supervisor, "worker-1").spec.cards == ("1",)
    assert child_called(supervisor, "worker-standby-1").spec.cards == ("0",)


async def test_it_is_no_capacity(spec: Spec, supervise: Supervise, deployment: Deployment) -> None:
    supervisor = supervise(*specs_of(spec, workers=1, standby=2))
    async with BackgroundTasks() as tasks:
        running = tasks.start(supervisor.run())
        await supervisor.ready.wait()
        record = describe_workers(supervisor.children, {}, {})
        assert record.desired == {"worker": 1}
        assert set(record.kinds) == {"worker"}
        request = ControlRequest("scale", "worker", 2)
        await asyncio.to_thread(
            lambda: list(send_control_request(request, deployment.folder, 20.0))
        )
        names = sorted(child.spec.name for child in supervisor.children if child.desired)
        assert names == ["worker-1", "worker-2", "worker-standby-1", "worker-standby-2"]
        supervisor.stop()
        await running


def test_each_kind_of_worker_has_its_own(spec: Spec) -> None:
    workers = specs_of(spec, standby=0)
    other = replace(workers[0], name="decode-worker", settings=specs_of(spec)[0].settings)
    frontend = replace(other, role="frontend", name="frontend")
    added = with_standbys([frontend, *workers, other])[len(workers) + 2 :]
    assert [(child.name, child.standby) for child in added] == [("decode-worker-standby-1", True)]
    with pytest.raises(ConfigError, match="URLs"):
        specs_of(spec, urls=("http://127.0.0.1:1",))
