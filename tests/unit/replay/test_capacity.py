"""The search for the highest rate within limits of latency."""

from __future__ import annotations

import pytest

from dynamo.operations.latency_summary import LatencySummary
from dynamo.operations.replay.result import LatencyLimit, PrefillCounts, ReplayResult, find_capacity

LIMITS = [LatencyLimit("ttft_ms", "p90", 1000.0)]


def result_at(speed: float, ttft_ms: float, completed: int = 10) -> ReplayResult:
    latency = LatencySummary(10, *[ttft_ms] * 7)
    return ReplayResult(
        trace="",
        settings={},
        requests=10,
        completed=completed,
        rejected=10 - completed,
        reuse_first_admission=0.0,
        ttft_ms=latency,
        tpot_ms=latency,
        itl_ms=latency,
        e2e_ms=latency,
        output_tokens_per_s=100 * speed,
        duration_s=10 / speed,
        preemptions=0,
        evictions=0,
        requests_per_worker=[],
        prefills=PrefillCounts(10, 0),
        kv_bytes_moved=0,
        errors={},
        wall_s=0.0,
        cpu_s=0.0,
    )


@pytest.mark.parametrize("highest", [0.013, 0.9, 1.0, 17.3, 300.0])
def test_the_search_ends_within_a_hundredth_below_the_highest_speed(highest: float) -> None:
    tried = []

    def replay_at(speed: float) -> ReplayResult:
        tried.append(speed)
        return result_at(speed, 1000.0 * speed / highest)

    speed, result = find_capacity(replay_at, LIMITS, 4)

    assert highest / 1.01 <= speed <= highest
    assert result.capacity is not None
    assert result.capacity.requests_per_s == pytest.approx(speed)
    assert result.capacity.output_tokens_per_s_per_gpu == pytest.approx(25 * speed)
    assert len(tried) < 20
    assert len(set(tried)) == len(tried)


def test_a_speed_at_which_requests_are_rejected_does_not_count() -> None:
    speed, _ = find_capacity(
        lambda speed: result_at(speed, 1.0, completed=10 if speed <= 3 else 9), LIMITS, 1
    )

    assert 3 / 1.01 <= speed <= 3


def test_limits_that_no_speed_keeps_give_a_capacity_of_0() -> None:
    _, result = find_capacity(lambda speed: result_at(speed, 1001.0), LIMITS, 1)

    assert result.capacity is not None
    assert result.capacity.speed == 0


def test_limits_that_every_speed_keeps_give_a_lower_bound() -> None:
    speed, result = find_capacity(lambda speed: result_at(speed, 999.0), LIMITS, 1)

    assert result.capacity is not None
    assert (speed, result.capacity.lower_bound) == (1024.0, True)
    assert result.capacity.requests_per_s == pytest.approx(speed)
