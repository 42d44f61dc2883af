"""Tuning of a deployment that serves."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError, InvalidRequest
from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.values import SourcedValue
from dynamo.core.timing.model import Timing
from dynamo.operations.planner.values import EngineLimits
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.tuner.search import SettingSearch
from dynamo.operations.tuner.tuner import AutoTuner
from dynamo.operations.tuner.verdict import TrialVerdict
from dynamo.services.planning.backtests import WorkerFacts
from dynamo.services.planning.planner import search_record

FACTS = WorkerFacts(Timing(10.0, 0.05, 0.05, 5e-5), EngineLimits(16, 200_000, 512), 10.0)


def make_search(workers: int = 1) -> SettingSearch:
    planner = replace(Settings().planner, ttft=2.0, itl=60.0)
    requests = [
        TraceConversation(number / 30, [TraceRequest(number, 400, 60)]) for number in range(200)
    ]
    return search_record(replace(Settings(), planner=planner), requests, FACTS, workers)


class OneRoundClock(SystemClock):
    """Sleeps once."""

    slept = 0

    async def sleep(self, seconds: float) -> None:
        self.slept += 1
        if self.slept > 1:
            raise asyncio.CancelledError


async def test_a_deployment_is_tuned_by_its_record(caplog: pytest.LogCaptureFixture) -> None:
    rounds = []

    async def round_of(kind: str, values: object) -> TrialVerdict:
        rounds.append((kind, values))
        return TrialVerdict(keep=True, why="it gained 40.0%")

    tuner = AutoTuner(search=make_search, run_round=round_of, clock=OneRoundClock())
    caplog.set_level(logging.INFO)
    with pytest.raises(asyncio.CancelledError):
        await tuner.run()
    ((kind, values),) = rounds
    assert kind == "worker"
    assert values["engine.max_num_seqs"] > 16  # type: ignore[index]
    assert "settings tried: it gained 40.0%" in caplog.text


async def test_what_hinders_a_round_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def busy(kind: str, values: object) -> TrialVerdict:
        raise InvalidRequest("worker-2 starts or drains; a trial waits until all serve")

    tuner = AutoTuner(search=make_search, run_round=busy, clock=OneRoundClock())
    caplog.set_level(logging.INFO)
    with pytest.raises(asyncio.CancelledError):
        await tuner.run()
    assert "nothing is tuned" in caplog.text


def test_tuning_while_serving_needs_the_planner() -> None:
    flags = {"tuner.auto_tune_interval": SourcedValue("1h", "flag --tuner.auto_tune_interval")}
    with pytest.raises(ConfigError, match="needs the planner"):
        resolve_settings(flags, {}, None)
    enabled = flags | {"planner.enabled": SourcedValue("true", "flag --planner")}
    assert resolve_settings(enabled, {}, None).settings.tuner.auto_tune_interval == 3600
