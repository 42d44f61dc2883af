"""Scaling while processes of the kind drain, with tiny real children."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.supervisors import control, serving

from dynamo.core.errors import NotFound
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.supervisor import Supervisor

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]
SERVE = 'tell(state="ready"); signal.pause()'
DRAINS_UNTIL = """
import pathlib
done = pathlib.Path({path!r})
def drain(*_):
    tell(state="draining")
    while not done.exists():
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, drain)
tell(state="ready")
os.write(0, b'"alive %d"\\n' % {calls}.get(start["name"], 0))
while True: signal.pause()
"""


async def test_a_start_does_not_wait_for_a_drain(
    spec: Spec, supervise: Supervise, deployment: Deployment, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    script = DRAINS_UNTIL.format(path=str(done), calls={})
    async with serving(supervise(spec(script, "worker-1"), spec(SERVE, "frontend"))) as supervisor:
        drained = asyncio.create_task(control(deployment, "scale", "worker", 0))
        while supervisor.children[0].report.state != "draining":
            await asyncio.sleep(0.01)
        with pytest.raises(NotFound, match="worker-1"):
            await control(deployment, "drain", "worker-1")  # leaves already
        assert await control(deployment, "scale", "worker", 1) == ["worker-2 serves"]
        assert await control(deployment, "restart", "frontend") == ["frontend was replaced"]
        assert not drained.done()
        done.touch()
        assert await drained == ["worker-1 has left"]
        assert sorted(child.spec.name for child in supervisor.children) == ["frontend", "worker-2"]


async def test_a_start_waits_for_the_devices_of_a_drain(
    spec: Spec, supervise: Supervise, deployment: Deployment, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    script = DRAINS_UNTIL.format(path=str(done), calls={})
    only = replace(spec(script, "worker-1"), cards=("0",))
    async with serving(supervise(only, spec(SERVE, "frontend"))) as supervisor:
        drained = asyncio.create_task(control(deployment, "scale", "worker", 0))
        while supervisor.children[0].report.state != "draining":
            await asyncio.sleep(0.01)
        started = asyncio.create_task(control(deployment, "scale", "worker", 1))
        await control(deployment, "restart", "frontend")
        assert not started.done()
        done.touch()
        assert await drained == ["worker-1 has left"]
        assert await started == ["worker-1 serves"]


async def test_the_least_busy_leave(
    spec: Spec, supervise: Supervise, deployment: Deployment, tmp_path: Path
) -> None:
    (done := tmp_path / "done").touch()
    calls = {"worker-1": 3, "worker-2": 1, "worker-3": 2}
    script = DRAINS_UNTIL.format(path=str(done), calls=calls)
    async with serving(supervise(*(spec(script, name) for name in calls))) as supervisor:
        while {child.spec.name: child.calls for child in supervisor.children} != calls:
            await asyncio.sleep(0.01)
        assert await control(deployment, "scale", "worker", 2) == ["worker-2 has left"]
        assert await control(deployment, "scale", "worker", 1) == ["worker-3 has left"]
