"""Arrival times of sessions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from dynamo.operations.bench.workload import LoadProfile, RequestPlan, RequestShape, SessionPlan


def synthetic_sessions(shape: RequestShape) -> Iterator[SessionPlan]:
    """Yield endless sessions of one shape."""
    turn = RequestPlan(shape.input_tokens, shape.output_tokens)
    while True:
        yield SessionPlan([turn] * shape.turns, history=shape.turns > 1)


def arrival_times(load: LoadProfile) -> Iterator[float]:
    """Yield session starts in seconds from the beginning of the run. Starts are evenly spaced if
    `load.even`, else a Poisson process. The rate grows linearly from `rate` to `rate_to` over
    `duration_s`."""
    rng = random.Random(load.seed)
    slope = ((load.rate_to or load.rate) - load.rate) / load.duration_s if load.duration_s else 0.0
    count = 0.0
    while True:
        count += 1.0 if load.even else rng.expovariate(1.0)
        start_s = _time_of_arrival(count, load.rate, slope)
        if start_s is None or (load.duration_s and start_s > load.duration_s):
            return
        yield start_s


def _time_of_arrival(count: float, rate: float, slope: float) -> float | None:
    """Return when `count` requests have arrived at a rate that grows by `slope` per second. None if
    a falling rate never reaches that count."""
    if abs(slope) < 1e-12:
        return count / rate
    root = rate * rate + 2 * slope * count
    return (math.sqrt(root) - rate) / slope if root >= 0 else None


def schedule_sessions(
    sessions: Iterator[SessionPlan] | Sequence[SessionPlan], load: LoadProfile
) -> Iterator[SessionPlan]:
    """Yield the sessions with their start times; a rate in `load` replaces their own."""
    if not load.rate:
        yield from sessions
        return
    for start_s, session in zip(arrival_times(load), sessions, strict=False):
        yield SessionPlan(session.turns, start_s, session.history)
