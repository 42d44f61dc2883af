"""Trials of settings on one process: kept by all, or by none, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.supervisors import control, serving

from dynamo.core.errors import ConfigError, InvalidRequest, ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.settings.reload import replace_setting
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.control import RunningTrial, trying
from dynamo.runtime.processes.reload import SettingsReloader
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.runtime.processes.tuned_settings import TunedSettings

Spec = Callable[..., ChildSpec]
Supervise = Callable[..., Supervisor]
SERVE = 'tell(state="ready", key=f"/workers/{os.getpid()}"); signal.pause()'
PICKY = """
if start["settings"]["engine"].get("max_num_seqs") == 64:
    tell(fatal="no room", hint="make some"); sys.exit(1)
tell(state="ready"); signal.pause()
"""
ONCE = """
import pathlib
marker = pathlib.Path({path!r})
if start["settings"]["engine"].get("max_num_seqs") == 64:
    if marker.exists():
        tell(fatal="no room", hint="make some"); sys.exit(1)
    marker.touch()
tell(state="ready"); signal.pause()
"""
KEY = "engine.max_num_seqs"


def values(supervisor: Supervisor) -> Sequence[int]:
    """The setting of each process that is to serve."""
    return [
        child.spec.settings.engine.max_num_seqs for child in supervisor.children if child.desired
    ]


async def settled(supervisor: Supervisor, expected: Sequence[int]) -> None:
    """Wait until all processes serve and none drains."""
    while values(supervisor) != expected or not all(
        child.ready and child.desired for child in supervisor.children
    ):
        await asyncio.sleep(0.01)


def workers(spec: Spec, count: int = 3, code: str = SERVE) -> list[ChildSpec]:
    return [spec(code, f"worker-{number}") for number in range(1, count + 1)]


def start(deployment: Deployment, value: int = 64, limit_s: int = 60) -> Any:
    return trying(deployment.folder, "worker", {KEY: value}, limit_s)


async def test_settings_are_tried_on_one_process_and_kept_by_all(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(*workers(spec))) as supervisor:
        async with start(deployment) as trial:
            assert sorted(values(supervisor)) == [0, 0, 64]
            (tried,) = [c for c in supervisor.children if c.spec.settings.engine.max_num_seqs]
            assert trial.instance == tried.instance
            assert await trial.keep() == "worker: engine.max_num_seqs = 64"
        assert values(supervisor) == [64, 64, 64]
        await control(deployment, "scale", "worker", 4)
        await control(deployment, "restart", "worker-1")
        assert values(supervisor) == [64, 64, 64, 64]
        with pytest.raises(ConfigError, match="has these settings already"):
            async with start(deployment):
                pass


@pytest.mark.parametrize("end", ["verdict", "death"])
async def test_settings_that_nobody_keeps_are_taken_back(
    spec: Spec, supervise: Supervise, deployment: Deployment, end: str
) -> None:
    async with serving(supervise(*workers(spec))) as supervisor:
        async with start(deployment) as trial:
            assert sorted(values(supervisor)) == [0, 0, 64]
            if end == "verdict":
                await trial.take_back()
                assert values(supervisor) == [0, 0, 0]
        await settled(supervisor, [0, 0, 0])
        await control(deployment, "scale", "worker", 4)
        assert values(supervisor) == [0, 0, 0, 0]


async def kill(supervisor: Supervisor, instance: str) -> None:
    """Kill a process, and wait until its supervisor knows."""
    (child,) = [each for each in supervisor.children if each.instance == instance]
    os.kill(child.pid, signal.SIGKILL)
    while not child.restarts:
        await asyncio.sleep(0.01)


async def died(trial: RunningTrial, supervisor: Supervisor, deployment: Deployment) -> None:
    del deployment
    await kill(supervisor, trial.instance)


async def sibling_died(trial: RunningTrial, supervisor: Supervisor, deployment: Deployment) -> None:
    del deployment
    instances = [child.instance for child in supervisor.children]
    await kill(supervisor, next(each for each in instances if each != trial.instance))


async def scaled(trial: RunningTrial, supervisor: Supervisor, deployment: Deployment) -> None:
    del trial, supervisor
    await control(deployment, "scale", "worker", 4)


async def drained(trial: RunningTrial, supervisor: Supervisor, deployment: Deployment) -> None:
    del trial, supervisor
    await control(deployment, "scale", "worker", 2)


@pytest.mark.parametrize("disturb", [died, sibling_died, scaled, drained])
async def test_a_change_of_the_processes_ends_a_trial(
    spec: Spec, supervise: Supervise, deployment: Deployment, disturb: Any
) -> None:
    async with serving(supervise(*workers(spec))) as supervisor:
        async with start(deployment) as trial:
            await disturb(trial, supervisor, deployment)
            with pytest.raises(InvalidRequest, match="processes have started or left"):
                await trial.keep()
        counts = {scaled: 4, drained: 2}
        await settled(supervisor, [0] * counts.get(disturb, 3))


async def test_a_hung_tuner_and_a_second_one(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(*workers(spec, 2))) as supervisor, start(deployment) as trial:
        with pytest.raises(InvalidRequest, match="another trial is running"):
            async with start(deployment, 128):
                pass
        assert sorted(values(supervisor)) == [0, 64]
        await trial.take_back()
        async with start(deployment, limit_s=1) as hung:
            answer = await hung.reader.read()
        assert b"there was no verdict after 1 s" in answer
        assert values(supervisor) == [0, 0]


async def test_a_process_that_cannot_start_leaves_the_old_settings(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    async with serving(supervise(*workers(spec, 2, PICKY))) as supervisor:
        with pytest.raises(ModelUnavailable, match="no room"):
            async with start(deployment):
                pass
        assert values(supervisor) == [0, 0]


async def test_a_roll_that_fails_midway_is_taken_back(
    spec: Spec, supervise: Supervise, deployment: Deployment, tmp_path: Path
) -> None:
    once = ONCE.format(path=str(tmp_path / "started"))
    async with serving(supervise(*workers(spec, 3, once))) as supervisor:
        async with start(deployment) as trial:
            with pytest.raises(ModelUnavailable, match="no room"):
                await trial.keep()
        assert values(supervisor) == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "tried", "message"),
    [
        ("worker", {"engine.block_size": 32}, "engine.block_size cannot be changed while"),
        ("worker", {"no.such": 32}, "no.such cannot be changed while"),
        ("worker", {KEY: -1}, "engine.max_num_seqs = -1: "),
        ("worker", {}, "a trial needs settings"),
        ("frontend", {KEY: 64}, "there is 1 process frontend"),
    ],
)
async def test_wrong_trials_are_refused(
    spec: Spec,
    supervise: Supervise,
    deployment: Deployment,
    kind: str,
    tried: dict[str, Any],
    message: str,
) -> None:
    specs = [*workers(spec, 2), spec(SERVE, "frontend")]
    async with serving(supervise(*specs)) as supervisor:
        with pytest.raises(ConfigError, match=message):
            async with trying(deployment.folder, kind, tried, 60):
                pass
        assert values(supervisor) == [0, 0, 0]


def test_settings_written_by_somebody_come_first(spec: Spec) -> None:
    tuned, (written,) = TunedSettings(), workers(spec, 1)
    tuned.change("worker", {KEY: 0}, {KEY: 64})
    tuned.change("worker", {KEY: 64}, {KEY: 128})
    (applied,) = tuned.apply([written])
    assert applied.settings.engine.max_num_seqs == 128
    other = replace(written, settings=replace_setting(Settings(), KEY, 8))
    assert tuned.apply([other]) == [other]
    tuned.change("worker", {KEY: 128}, {KEY: 0})
    assert tuned.apply([written]) == [written]


async def test_a_reload_keeps_what_was_tuned(
    spec: Spec, supervise: Supervise, deployment: Deployment
) -> None:
    specs = workers(spec, 2)
    reloader = SettingsReloader(lambda: specs)
    async with serving(supervise(*specs, reload=reloader)) as supervisor:
        async with start(deployment) as trial:
            await trial.keep()
        reloader.request_reload()
        await control(deployment, "restart", "worker")
        assert values(supervisor) == [64, 64]
