"""A healthy day with its peak raises no alert; a quarter of an hour of failures in it does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from random import Random

import pytest
from tests.simulation.conftest import BLOCK, cluster

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.operations.alerts.evaluator import AlertEvaluator, MetricSample
from dynamo.operations.alerts.rules import RULES
from dynamo.operations.arrivals import Arrivals
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.trace import TraceConversation, TraceRequest

DAY_S = 86_400
NIGHT_PER_S, PEAK_PER_S = 0.02, 0.5
STEP_S = 10
PEAK_S = DAY_S // 2
FRONTEND = {"process": "frontend", "role": "frontend", "model": "m"}
WORKERS = ("worker-1", "worker-2", "worker-3", "worker-4")

Fails = Callable[[float], bool]


@pytest.fixture(scope="module")
def day() -> ReplayLog:
    """The requests of a day: 2,000 prompt tokens and 200 output tokens in the mean."""
    chance = Random(7)
    times = Arrivals(NIGHT_PER_S, PEAK_PER_S, DAY_S, day_s=DAY_S).times(chance)
    conversations = [
        TraceConversation(
            time_s, (TraceRequest(row, chance.randrange(400, 3_600), chance.randrange(20, 380)),)
        )
        for row, time_s in enumerate(times)
    ]
    assert len(conversations) > 20_000
    plan = ReplayPlan("day", cluster(), RouterSettings(mode="kv"), BLOCK)
    result, log = FastReplay(plan).run(conversations)
    assert result.completed == len(conversations)
    return log


class DayMetrics:
    """The metrics of a deployment's processes at each time of the day. Requests that arrive when
    `fails` is true are answered 503; one in 50 was wrong, and one in 100 was given up."""

    def __init__(self, log: ReplayLog, fails: Fails) -> None:
        ended, late, gaps, stalls, statuses = [], [], [], [], []
        for row, (arrived_s, ttft_s, e2e_s, tokens) in enumerate(
            zip(log.arrived_s, log.ttft_s, log.e2e_s, log.tokens, strict=True)
        ):
            status = "400" if row % 50 == 0 else "499" if row % 100 == 1 else "200"
            gap_s = (e2e_s - ttft_s) / max(1, tokens - 1)
            ended.append((arrived_s + e2e_s, len(ended)))
            late.append(ttft_s > 5)
            gaps.append(tokens - 1)
            stalls.append((tokens - 1) * (gap_s > 2))
            statuses.append("503" if fails(arrived_s) else status)
        order = [number for _, number in sorted(ended)]
        self._ended = sorted(time_s for time_s, _ in ended)
        self._sums: Mapping[str, Sequence[int]] = {
            "late": self._sum(late, order),
            "gaps": self._sum(gaps, order),
            "stalls": self._sum(stalls, order),
            **{
                status: self._sum([each == status for each in statuses], order)
                for status in ("200", "400", "499", "503")
            },
        }

    @staticmethod
    def _sum(values: Sequence[int], order: Sequence[int]) -> Sequence[int]:
        return [0, *accumulate(int(values[number]) for number in order)]

    def at(self, now: float) -> Iterator[MetricSample]:
        """Yield the samples of a scrape."""
        count = bisect_right(self._ended, now)
        sums = {name: values[count] for name, values in self._sums.items()}

        def of_frontend(name: str, value: float, **labels: str) -> MetricSample:
            return MetricSample(name, FRONTEND | labels, value)

        for status in ("200", "400", "499", "503"):
            yield of_frontend("dynamo_frontend_requests_total", sums[status], status=status)
        first = "dynamo_frontend_time_to_first_token_seconds"
        yield of_frontend(f"{first}_count", count)
        yield of_frontend(f"{first}_bucket", count - sums["late"], le="5.0")
        gap = "dynamo_frontend_inter_token_latency_seconds"
        yield of_frontend(f"{gap}_count", sums["gaps"])
        yield of_frontend(f"{gap}_bucket", sums["gaps"] - sums["stalls"], le="2.0")
        yield of_frontend("dynamo_admission_rejected_total", sums["503"], reason="late")
        yield of_frontend("dynamo_frontend_workers", len(WORKERS))
        for name in ("seen", "reachable", "prompt"):
            yield of_frontend(f"dynamo_router_{name}_blocks_total", 30 * count)
        for plane in ("discovery", "events", "requests"):
            yield of_frontend("dynamo_plane_up_ratio", 1, plane=plane)
        for name in ("frontend", *WORKERS):
            process = {"process": name}
            yield MetricSample("dynamo_build_info", process | {"version": "1.0"}, 1)
            yield MetricSample("process_open_fds", process, 100 + count % 64)
            yield MetricSample("process_max_fds", process, 1_048_576)
            yield MetricSample("dynamo_loop_stalls_total", process, now // 1_000)
        for name in WORKERS:
            labels = {"process": "supervisor", "name": name, "child_role": "worker"}
            yield MetricSample("dynamo_supervisor_restarts_total", labels, 0)


def alerts_of(log: ReplayLog, fails: Fails) -> dict[str, list[float]]:
    """Return the times at which each alert was active."""
    metrics, evaluator = DayMetrics(log, fails), AlertEvaluator(RULES)
    active: dict[str, list[float]] = {}
    for now in range(0, DAY_S, STEP_S):
        for alert in evaluator.update(metrics.at(now), now):
            active.setdefault(alert.rule.name, []).append(now)
    return active


def test_a_healthy_day_raises_no_alert(day: ReplayLog) -> None:
    assert alerts_of(day, lambda _: False) == {}


def test_failures_at_the_peak_are_noticed_within_a_minute_and_end(day: ReplayLog) -> None:
    active = alerts_of(day, lambda time_s: PEAK_S <= time_s < PEAK_S + 900)
    assert active.keys() >= {"CapacityShort", "BudgetBurnsFast", "BudgetBurns"}
    for name in ("CapacityShort", "BudgetBurnsFast"):
        assert PEAK_S < active[name][0] <= PEAK_S + 60, name
        assert active[name][-1] < PEAK_S + 900 + 600, name
