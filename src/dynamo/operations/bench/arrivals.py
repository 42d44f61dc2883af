"""When requests come."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from dynamo.operations.bench.workload import LoadProfile, RequestPlan, RequestShape, SessionPlan


def synthetic_sessions(shape: RequestShape) -> Iterator[SessionPlan]:
    """Conversations without end, all of one shape."""
    turn = RequestPlan(shape.input_tokens, shape.output_tokens)
    while True:
        yield SessionPlan([turn] * shape.turns, history=shape.turns > 1)


def arrival_times(load: LoadProfile) -> Iterator[float]:
    """Seconds from the begin at which sessions start: by chance (Poisson), or evenly; the rate
    grows evenly from `rate` to `rate_to` over `duration_s`."""
    chance = random.Random(load.seed)
    slope = ((load.rate_to or load.rate) - load.rate) / load.duration_s if load.duration_s else 0.0
    due = 0.0
    while True:
        due += 1.0 if load.even else chance.expovariate(1.0)
        at = _time_of_arrival(due, load.rate, slope)
        if at is None or (load.duration_s and at > load.duration_s):
            return
        yield at


def _time_of_arrival(count: float, rate: float, slope: float) -> float | None:
    """When a rate that grows by `slope` has brought `count` requests; None: never."""
    if abs(slope) < 1e-12:
        return count / rate
    root = rate * rate + 2 * slope * count
    return (math.sqrt(root) - rate) / slope if root >= 0 else None


def schedule_sessions(
    sessions: Iterator[SessionPlan] | Sequence[SessionPlan], load: LoadProfile
) -> Iterator[SessionPlan]:
    """Each session with a start: its own, unless a rate is asked for."""
    if not load.rate:
        yield from sessions
        return
    for start_s, session in zip(arrival_times(load), sessions, strict=False):
        yield SessionPlan(session.turns, start_s, session.history)
