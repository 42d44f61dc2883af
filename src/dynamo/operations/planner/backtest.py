"""How much of a worker's time forecast work may take, by what a record would have done."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from dynamo.operations.planner.planner import ScalePlanner
from dynamo.operations.planner.simulation import TAIL_S, Trial, play, play_static, with_size

ETAS = [number / 100 for number in range(95, 40, -5)]
ALLOWED = 0.01
"""The share of promises that may be broken beyond those that many workers break, too."""
MIN_RECORD_S = 900.0
WARM_UP_S = 600.0
"""The begin of a record is not scored: at most so much, and a third."""
MIN_REQUESTS = 200

MakePlanner = Callable[[float, int], ScalePlanner]
"""Returns the planner for an eta and a peak."""


class Backtest(msgspec.Struct, frozen=True):
    """`eta`: the largest share of a worker's time with which the policy keeps the promise, with
    what it breaks and costs then. `peak`: the fewest fixed workers that keep the promise. `floor`:
    the share that many workers break, too."""

    eta: float
    peak: int
    floor: float
    broken: float
    gpu_hours: float


def backtest(trial: Trial, make_planner: MakePlanner) -> Backtest:
    """Return the result of the policy on recorded requests. Takes a dozen replays."""
    warm_up_s = min(WARM_UP_S, (trial.end_s - TAIL_S) / 3)
    trial, many = replace(trial, from_s=max(trial.from_s, warm_up_s)), 1
    before = play_static(trial, many)
    while True:  # until more workers change nothing
        after = play_static(trial, 2 * many)
        if after.broken >= before.broken - ALLOWED and before.broken < 1 - ALLOWED:
            break
        many, before = 2 * many, after
        if many > len(trial.conversations):
            break
    floor = min(after.broken, before.broken)
    low, high = 0, many
    while high - low > 1:
        middle = (low + high) // 2
        if play_static(trial, middle).broken <= floor + ALLOWED:
            high = middle
        else:
            low = middle
    for eta in ETAS:
        result = play(with_size(trial, high), make_planner(eta, high))
        if result.broken <= floor + ALLOWED:
            break
    return Backtest(eta, high, floor, result.broken, result.gpu_hours)


def short_record(trial_s: float, requests: int) -> str:
    """Return why a record is too short for a backtest, or ""."""
    if trial_s >= MIN_RECORD_S and requests >= MIN_REQUESTS:
        return ""
    return (
        f"the history has {requests} requests in {trial_s / 60:.0f} minutes; a backtest needs "
        f"{MIN_REQUESTS} in {MIN_RECORD_S / 60:.0f}"
    )
