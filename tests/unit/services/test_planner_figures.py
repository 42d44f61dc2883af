"""The figures of a deployment for its planner, and the backtest on its record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from dynamo.communication.discovery import open_discovery
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo, Load
from dynamo.operations.planner.values import EngineLimits
from dynamo.scheduling.request_record import RequestRecord
from dynamo.services.planning.backtests import WorkerFacts, run_backtest
from dynamo.services.planning.figures import count_figures, sum_changes, usual_timing
from dynamo.services.planning.planner import PLANNERS_PREFIX, PlannerService

METRICS = """\
# HELP dynamo_frontend_requests_total Requests
dynamo_frontend_requests_total{model="a",endpoint="chat",status="200"} 7
dynamo_frontend_requests_total{model="a",endpoint="chat",status="503"} 2
dynamo_frontend_requests_total{model="",endpoint="chat",status="404"} 9
dynamo_frontend_input_tokens_total{model="a"} 700
dynamo_frontend_inflight_requests 3
dynamo_frontend_queued_requests 1
dynamo_admission_waiting_requests 2
"""
FACTS = WorkerFacts(Timing(12.0, 0.09, 0.05, 6e-5), EngineLimits(), 10.0)


def test_figures_count_rejected_requests_and_not_wrong_ones() -> None:
    figures = count_figures(METRICS)
    assert figures["a", "ended"] == 9
    assert figures["", "ended"] == 0
    assert figures["a", "prompt_tokens"] == 700
    assert figures["", "in_flight"] == 3
    assert figures["", "waiting"] == 3


def test_a_restarted_frontend_counts_from_nothing() -> None:
    before = {"one": Counter({("a", "ended"): 100}), "gone": Counter({("a", "ended"): 5})}
    now = {
        "one": Counter({("a", "ended"): 4, ("", "in_flight"): 2}),
        "new": Counter({("a", "ended"): 3, ("", "in_flight"): 1}),
    }
    changes = sum_changes(now, before)
    assert changes["a", "ended"] == 7
    assert changes["", "in_flight"] == 3
    assert changes["", "more_in_flight"] == 3


def test_the_timing_is_that_of_workers_which_have_learnt_it() -> None:
    old, new = Load(steps=5000, timing=(12, 0.1, 0.05, 0.001, 0)), Load(steps=60)
    new = replace(new, timing=(40, 0, 0, 0, 0))
    assert usual_timing([(old, None), (new, None), (new, None)]) == Timing(12, 0.1, 0.05, 0.001)
    assert usual_timing([(new, None)]) == Timing(40, 0, 0, 0)
    assert usual_timing([(Load(), None)]) is None

    prompts = EngineInfo("mock", 16, 100, 1000, 8, 512, roles=("prefill",))
    answers = replace(prompts, roles=("decode",))
    few = Load(steps=300, timing=(10, 0.2, 0, 0, 1e-6))
    assert usual_timing([(few, prompts), (old, answers)]) == Timing(12, 0.2, 0.05, 0.001, 1e-6)
    assert usual_timing([(few, prompts)]) == Timing(10, 0.2, 0, 0, 1e-6)


def test_a_record_that_is_too_short_is_no_backtest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 requests in 0 minutes; a backtest needs"):
        run_backtest(Settings(), tmp_path, FACTS)


def test_a_backtest_plays_the_record(tmp_path: Path) -> None:
    rows = [RequestRecord(number * 2000.0, 3000, 100, cached_tokens=500) for number in range(500)]
    lines = b"\n".join(map(msgspec.json.encode, rows))
    (tmp_path / "frontend-1.jsonl").write_bytes(lines + b'\n{"timestamp": 1, "inp')
    tested = run_backtest(Settings(), tmp_path, FACTS)
    assert tested.peak == 1
    assert tested.broken == 0.0


async def test_of_two_planners_the_older_acts() -> None:
    plane = await open_discovery("memory:two-planners")
    planners = []
    for name, since in (("b", 1.0), ("a", 2.0)):
        planner = PlannerService()
        planner._key = f"{PLANNERS_PREFIX}test/{name}"
        planner._runtime = SimpleNamespace(discovery=plane)  # type: ignore[assignment]
        await plane.put(planner._key, f"{since:017.6f}".encode())
        planners.append(planner)
    assert [await each._is_first() for each in planners] == [True, False]
    await plane.delete(planners[0]._key)
    assert await planners[1]._is_first()
    await plane.close()
