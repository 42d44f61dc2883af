"""The verdict on settings that one process has, beside its siblings, over the same minutes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamo.operations.planner.values import Promise
from dynamo.operations.tuner.outcome import BROKEN_COST, Array

WINDOWS, MIN_WINDOWS = 20, 8
"""Both are compared window by window, so that the load counts for both alike."""
MIN_REQUESTS = 30
SURE, ALONE = 2.3, 2.5
"""Standard errors by which a gain must be above 0, and so many times as much beside one sibling."""
SETTLING = 0.2
"""The share of the period after the start that is not compared, and that requests may take."""
SAME_LOAD, CLEAR_PERCENT = 0.95, 70.0
"""A common queue has become shorter if there are about as many requests as before, and most windows
before have a longer one than most windows now."""
MORE_BROKEN = 0.01
HARM, MIN_HARM = 0.002, 3.0
"""A trial ends early when so many more requests wait, or have broken a promise, than at others: a
share of all requests of a period, and a number."""


class LiveRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended, the process that served it, and whether that has other settings.
    The times are None if it was not answered. `queue_s` is the part of them in a queue for all
    processes. `process` is "" where clients choose the process."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    e2e_s: float | None
    process: str
    tried: bool
    queue_s: float = 0.0


class TrialVerdict(msgspec.Struct, frozen=True):
    """Whether to keep settings, why, and how much less a request costs with them."""

    keep: bool
    why: str
    gain: float = 0.0


class TrialRules(msgspec.Struct, frozen=True):
    """The rules of a verdict. The trial began at `begin_s`."""

    promise: Promise
    period_s: float
    min_gain: float
    begin_s: float = 0.0


def judge(trial: TrialRules, requests: Sequence[LiveRequest], now_s: float) -> TrialVerdict | None:
    """Return the verdict at the end of the period, or before it if promises break; None: go on. The
    requests of a period before the trial tell how long the common queue was without it."""
    elapsed_s = now_s - trial.begin_s
    before = [each for each in requests if -trial.period_s <= each.arrived_s - trial.begin_s < 0]
    requests = [each for each in requests if each.arrived_s >= trial.begin_s]
    table = _Table(trial.promise, requests)
    excess = max(0.0, table.excess_broken()) + max(0.0, table.missing())
    if excess > max(MIN_HARM, HARM * len(requests) * trial.period_s / max(elapsed_s, 1e-9)):
        return TrialVerdict(
            False, f"{excess:.0f} more requests wait or broke a promise than at others"
        )
    if elapsed_s < trial.period_s:
        return None
    settling_s = SETTLING * trial.period_s
    begin_s, end_s = trial.begin_s + settling_s, now_s - settling_s
    inside = [each for each in requests if begin_s <= each.arrived_s < end_s]
    table = _Table(trial.promise, _with_own_queues(before, inside))
    if min(table.tried.sum(), (~table.tried).sum()) < MIN_REQUESTS:
        return TrialVerdict(False, f"fewer than {MIN_REQUESTS} requests can be compared")
    gain, margin = table.gain(begin_s, end_s) or table.more_ended()
    if table.excess_broken() > MORE_BROKEN * table.tried.sum():
        return TrialVerdict(False, "more promises were broken than by its siblings", gain)
    if gain < trial.min_gain:
        return TrialVerdict(False, f"it gained {gain:.1%}, less than {trial.min_gain:.1%}", gain)
    if math.log1p(-gain) + margin >= 0:
        return TrialVerdict(False, f"a gain of {gain:.1%} can be chance", gain)
    return TrialVerdict(True, f"it gained {gain:.1%}", gain)


class _Table:
    """Requests as arrays. `cost` is the logarithm of the time, more for broken promises."""

    def __init__(self, promise: Promise, requests: Sequence[LiveRequest]) -> None:
        self.arrived_s = np.array([each.arrived_s for each in requests], float)
        self.processes = np.array([each.process for each in requests], object)
        self.tried = np.array([each.tried for each in requests], bool)
        self.broken = np.array([_is_broken(each, promise) for each in requests], bool)
        self.kinds = np.array(
            [
                64 * int(math.log2(each.prompt_tokens + 1)) + int(math.log2(each.output_tokens + 1))
                for each in requests
            ],
            int,
        )
        times = np.array([math.nan if each.e2e_s is None else each.e2e_s for each in requests])
        self.cost = np.log(np.maximum(times, 1e-6)) + np.log1p(BROKEN_COST * self.broken)

    def excess_broken(self) -> float:
        """Return how many more promises the process broke than its siblings would have, beyond two
        standard deviations of that."""
        tried = int(self.tried.sum())
        others = self.broken[~self.tried]
        share = (others.sum() + 1) / (len(others) + 2)
        excess = self.broken[self.tried].sum() - tried * share
        return float(excess - 2 * math.sqrt(tried * share * (1 - share)))

    def missing(self) -> float:
        """Return how many requests fewer than its siblings the process has ended, beyond two
        standard deviations: they wait there."""
        siblings = len({*self.processes} - {""}) - 1
        if siblings < 1:
            return 0.0
        others = float((~self.tried).sum()) / siblings
        return others - float(self.tried.sum()) - 2 * math.sqrt(2 * others)

    def more_ended(self) -> tuple[float, float]:
        """Return the gain by the number of requests that have ended, and the margin of its
        logarithm: where most requests of the siblings wait, their times are not known."""
        tried, others = float(self.tried.sum()), float((~self.tried).sum())
        siblings = len({*self.processes} - {""}) - 1
        if siblings < 1:
            return 0.0, math.inf
        return 1 - others / siblings / tried, SURE * math.sqrt(1 / tried + 1 / others)

    def gain(self, begin_s: float, end_s: float) -> tuple[float, float] | None:
        """Return how much less a request costs than one of its kind at the siblings, and the margin
        of the logarithm. None: too few windows have requests of both."""
        relative = np.full(len(self.cost), math.nan)
        for kind in np.unique(self.kinds):
            members = self.kinds == kind
            others = self.cost[members & ~self.tried]
            answered = others[~np.isnan(others)]
            if len(answered):
                relative[members] = self.cost[members] - answered.mean()
        window = ((self.arrived_s - begin_s) / (end_s - begin_s) * WINDOWS).astype(int)
        answered = ~np.isnan(relative)
        differences = [
            relative[mine].mean() - relative[theirs].mean()
            for number in range(WINDOWS)
            if (mine := answered & (window == number) & self.tried).any()
            and (theirs := answered & (window == number) & ~self.tried).any()
        ]
        if len(differences) < MIN_WINDOWS:
            return None
        margin = SURE * float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
        margin = self._spread_margin(relative, margin)
        return 1 - math.exp(float(np.mean(differences))), margin

    def _spread_margin(self, relative: Array, margin: float) -> float:
        """Return the margin by how much siblings differ from each other, if that is more: queues
        last over several windows, which then tell less than their number."""
        names = sorted(set(self.processes[~self.tried]))
        means = [
            float(values.mean())
            for name in names
            if (values := relative[(self.processes == name) & ~np.isnan(relative)]).size
        ]
        if len(means) < 2:
            return ALONE * margin
        sure = 2 + 5 / (len(means) - 1)  # about Student's t
        spread = float(np.std(means, ddof=1)) * math.sqrt(1 + 1 / len(means))
        return max(margin, sure * spread)


def _with_own_queues(
    before: Sequence[LiveRequest], requests: Sequence[LiveRequest]
) -> Sequence[LiveRequest]:
    """Return requests as if each process had a queue of its own instead of a common one. A process
    that takes twice as many requests would have a queue half as long. If the queue was longer
    before, its siblings would still have that one."""
    served = Counter(each.process for each in requests)
    tried = {each.process for each in requests if each.tried}
    others = [count for process, count in served.items() if process not in tried]
    if not others or not tried or "" in served:
        return requests
    share = sum(served[process] for process in tried) / (sum(others) / len(others))
    longer_s = _shorter_queue_s(before, requests)
    return [
        _with_queue(each, -each.queue_s * (1 - 1 / share) if each.tried else longer_s)
        for each in requests
    ]


def _shorter_queue_s(before: Sequence[LiveRequest], after: Sequence[LiveRequest]) -> float:
    """Return by how much the common queue has become shorter, if not by chance or by less load."""
    queues = [_queue_windows(each) for each in (before, after)]
    if min(map(len, queues)) < MIN_WINDOWS or _rate(after) < SAME_LOAD * _rate(before):
        return 0.0
    old, new = queues
    if np.percentile(old, 100 - CLEAR_PERCENT) <= np.percentile(new, CLEAR_PERCENT):
        return 0.0
    return float(np.mean(old) - np.mean(new))


def _rate(requests: Sequence[LiveRequest]) -> float:
    times = [each.arrived_s for each in requests]
    return len(times) / max(1e-9, max(times) - min(times))


def _queue_windows(requests: Sequence[LiveRequest]) -> list[float]:
    """Return the mean time in the queue of each window that has requests."""
    ordered = sorted(requests, key=lambda each: each.arrived_s)
    if not ordered:
        return []
    edges = np.linspace(ordered[0].arrived_s, ordered[-1].arrived_s, WINDOWS + 1)
    places = np.searchsorted([each.arrived_s for each in ordered], edges)
    parts = [ordered[begin:end] for begin, end in pairwise(places)]
    return [sum(each.queue_s for each in part) / len(part) for part in parts if part]


def _with_queue(request: LiveRequest, more_s: float) -> LiveRequest:
    if not more_s:
        return request
    times = (None if each is None else each + more_s for each in (request.ttft_s, request.e2e_s))
    return replace(request, **dict(zip(("ttft_s", "e2e_s"), times, strict=True)))


def _is_broken(request: LiveRequest, promise: Promise) -> bool:
    if request.ttft_s is None or request.e2e_s is None:
        return True
    later_tokens = max(1, request.output_tokens - 1)
    itl_ms = (request.e2e_s - request.ttft_s) * 1e3 / later_tokens
    return request.ttft_s > promise.ttft_s or itl_ms > promise.itl_ms
