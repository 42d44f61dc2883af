"""The worker service: the end of its engine ends the process, and the end of the process does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo.core.settings import Settings
from dynamo.core.settings.schema import ModelSettings, RuntimeSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.mock.runner import MockRunner
from dynamo.runtime import DistributedRuntime
from dynamo.services import worker
from dynamo.services.worker import WorkerService


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(worker, "ENGINE_CHECK_INTERVAL_S", 0.001)
    return Settings(
        model=ModelSettings(path=str(tiny_model), names=("tiny",)),
        engine=EngineSettings(kind="mock"),
        runtime=RuntimeSettings(discovery=f"file:{tmp_path}"),
    )


async def test_a_slow_stop_of_the_engine_is_no_failure(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop_slowly(runner: MockRunner) -> None:
        await asyncio.sleep(0.05)

    monkeypatch.setattr(MockRunner, "stop", stop_slowly)
    runtime = await DistributedRuntime.create(settings, role="worker")
    await WorkerService().attach(runtime)
    await runtime.shutdown()
    assert runtime.failure is None


async def test_an_engine_that_dies_ends_the_process(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await DistributedRuntime.create(settings, role="worker")
    await WorkerService().attach(runtime)
    runtime.health.set_unhealthy(worker.ENGINE_HEALTH_KEY, "out of order")
    await runtime.stopping.wait()
    assert runtime.failure is not None
    assert "the engine died: out of order" in runtime.failure.message
    await runtime.shutdown()
