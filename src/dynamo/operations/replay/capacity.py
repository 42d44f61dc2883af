"""Search for the highest rate at which replays keep limits of latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from dynamo.operations.replay.result import LoadPoint, ReplayCapacity, ReplayResult

PRECISION = 0.01
"""The search ends when the lowest speed that failed exceeds the highest that held by this share."""
MAX_FACTOR = 1024.0
"""Speeds further than this from the first one are not tried."""


class LatencyLimit(msgspec.Struct, frozen=True):
    """An upper limit of a statistic of a latency: `ttft_ms`, `p90`, 1000.0."""

    latency: str
    statistic: str
    limit_ms: float

    def measured_ms(self, result: ReplayResult) -> float:
        """Return the limited value of a result."""
        value: float = getattr(getattr(result, self.latency), self.statistic)
        return value


def keeps_limits(result: ReplayResult, limits: Sequence[LatencyLimit]) -> bool:
    """Return True if all requests were completed and all limits kept."""
    return result.completed == result.requests and all(
        limit.measured_ms(result) <= limit.limit_ms for limit in limits
    )


def find_capacity(
    replay_at: Callable[[float], ReplayResult],
    limits: Sequence[LatencyLimit],
    gpus: int,
    speed: float = 1.0,
) -> tuple[float, ReplayResult]:
    """Return the highest speed that keeps the limits, and its result with its `capacity`.

    Doubles or halves `speed` until one speed holds and one fails, then bisects. If no speed holds,
    the result is that of the lowest speed, and its capacity is 0. If every speed holds, the result
    is that of the highest speed, and its capacity is a lower bound.
    """
    lowest, highest = speed / MAX_FACTOR, speed * MAX_FACTOR
    held, failed = 0.0, math.inf
    best = result = replay_at(speed)
    while True:
        if keeps_limits(result, limits):
            best, held = result, speed
        else:
            failed = speed
        if failed <= held * (1 + PRECISION):
            return held, replace(best, capacity=_measure_capacity(best, held, gpus))
        if failed <= lowest:
            return failed, replace(result, capacity=ReplayCapacity(0.0, 0.0, 0.0))
        if held >= highest:
            capacity = _measure_capacity(best, held, gpus)
            return held, replace(best, capacity=replace(capacity, lower_bound=True))
        speed = _next_speed(held, failed)
        result = replay_at(speed)


def measure_load_point(result: ReplayResult, speed: float, gpus: int) -> LoadPoint:
    """Return throughput for each GPU and speed for each user at one load."""
    tpot_ms = result.tpot_ms.mean
    return LoadPoint(
        speed=speed,
        tokens_per_s_per_gpu=result.output_tokens_per_s / gpus,
        tokens_per_s_per_user=1000.0 / tpot_ms if tpot_ms else 0.0,
        ttft_ms_p90=result.ttft_ms.p90,
    )


def _next_speed(held: float, failed: float) -> float:
    if not held:
        return failed / 2
    return held * 2 if failed == math.inf else math.sqrt(held * failed)


def _measure_capacity(result: ReplayResult, speed: float, gpus: int) -> ReplayCapacity:
    return ReplayCapacity(
        speed=speed,
        requests_per_s=result.completed / result.duration_s,
        output_tokens_per_s_per_gpu=result.output_tokens_per_s / gpus,
    )
