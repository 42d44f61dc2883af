"""The result file of a replay, and the search for the highest rate that keeps limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from dynamo.operations.latency_summary import LatencySummary
from dynamo.operations.replay.fleet import FleetChange


class PrefillCounts(msgspec.Struct, frozen=True):
    """Requests by the worker that computed the prompt: the one that decodes, or another."""

    local: int
    remote: int


class TierResult(msgspec.Struct, frozen=True):
    """The work of one tier for all engines. `hit_share`: the share of the prompt tokens of all
    admissions that it supplied. `load_s`: the sum of the loads' durations."""

    loaded_blocks: int
    stored_blocks: int
    evicted_blocks: int
    hit_share: float
    load_s: float


class ReplayCapacity(msgspec.Struct, frozen=True):
    """The highest load that keeps limits of latency. Rates are means from the first arrival to the
    last token. All is 0 if no load keeps them. `lower_bound`: every load that was tried keeps them,
    and a higher one may."""

    speed: float
    requests_per_s: float
    output_tokens_per_s_per_gpu: float
    lower_bound: bool = False


class LoadPoint(msgspec.Struct, frozen=True):
    """A point of a Pareto curve. A user's tokens per second are the inverse of the mean TPOT."""

    speed: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    ttft_ms_p90: float


class ReplayResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result file of a replay. Latencies are those of completed requests. `rejected` counts the
    `errors` of code `overloaded`. `reuse_first_admission` is the share of prompt tokens that a
    cache held when their request was first admitted. `tpot_ms` is each request's mean time between
    tokens, `itl_ms` every single one. `duration_s` is virtual time; `wall_s` and `cpu_s` are what
    the replay took. `requests_per_worker` has an entry for each data-parallel rank of each
    worker. `good_share` is the share of all requests that were completed within the objectives of
    the plan, `broken_promises` the number of the others. `gpu_hours` counts each worker from its
    order until it is gone. `moved_requests` lost a worker and went on at another one. `timeline`
    tells when workers started and left. `prefill_fallbacks` counts prompts whose KV did not arrive,
    by reason. Empty fields from there on are not written."""

    trace: str
    settings: Mapping[str, object]
    requests: int
    completed: int
    rejected: int
    reuse_first_admission: float
    ttft_ms: LatencySummary
    tpot_ms: LatencySummary
    itl_ms: LatencySummary
    e2e_ms: LatencySummary
    output_tokens_per_s: float
    duration_s: float
    preemptions: int
    evictions: int
    requests_per_worker: Sequence[int]
    prefills: PrefillCounts
    kv_bytes_moved: int
    errors: Mapping[str, int]
    wall_s: float
    cpu_s: float
    prefill_fallbacks: Mapping[str, int] = {}
    tiers: Mapping[str, TierResult] = {}
    good_share: float | None = None
    broken_promises: int | None = None
    gpu_hours: float = 0.0
    moved_requests: int = 0
    timeline: Sequence[FleetChange] = ()
    capacity: ReplayCapacity | None = None
    pareto: Sequence[LoadPoint] = ()


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
