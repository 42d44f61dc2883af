"""Candidates of large deployments: array arithmetic finds the workers of lowest cost."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from math import inf
from random import Random

import numpy as np

from dynamo.scheduling.router.costs.interface import REGRET_WINDOW, TABLE_ROWS, Cost, CostMatrix
from dynamo.scheduling.router.placement.candidates import (
    SHORT_PROMPT_TOKENS,
    STEP_FILL_SHARE,
    Candidates,
)
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.router.worker_arrays import Floats, Indices
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import WorkerStates

SHORTLIST = TABLE_ROWS + REGRET_WINDOW
"""Workers in a shortlist. The placements of a window use up at most REGRET_WINDOW - 1 of them, so
the cheapest TABLE_ROWS of all workers, the second best among them, are always known."""

BOUND_SAMPLE = 512
"""Costs from which a bound of the lowest ones is estimated."""


class ShortlistCandidates(Candidates):
    """Candidates for a cost with `costs_of_all`. The matrix of a request has the SHORTLIST workers
    of lowest cost. The shortlist is exact: a placement makes its worker cheaper only for requests
    that share blocks with it, and `RegretStep` adds the worker to the matrices of those. Where more
    workers are tied with the best, the matrix has a random part of them."""

    def __init__(self, states: WorkerStates, cost: Cost, max_backlog_s: float, rng: Random) -> None:
        super().__init__(states, cost, max_backlog_s)
        self._rng = rng
        self._arrays = cost.make_arrays(states)
        self._free_worker: WorkerState | None = None

    def begin(self, now: float) -> None:
        self._now = now
        self.priced_workers = SHORTLIST

    def matrix_for(self, request: PendingRequest) -> CostMatrix:
        arrays = self._arrays
        arrays.refresh(self._now)
        excluded = arrays.indices_of(request.excluded) if request.excluded else None
        matrix = self.cost.build_shortlist(request, arrays, excluded, self._choose, self._now)
        matrix.allowed = len(arrays.workers) - (0 if excluded is None else len(excluded))
        return matrix

    def _choose(self, costs: Floats) -> Indices:
        """Return the SHORTLIST lowest costs, or all that are not infinite."""
        if np.count_nonzero(costs < inf) > SHORTLIST:
            return find_cheapest(costs, SHORTLIST, self.cost.tie_tolerance, self._rng)
        return np.flatnonzero(costs < inf)

    def any_nearly_free(self, excluded: AbstractSet[str] = frozenset()) -> bool:
        worker = self._free_worker
        if (
            worker is not None
            and self._states.get(worker.name) is worker
            and worker.names.isdisjoint(excluded)
            and self.is_nearly_free(worker)
        ):
            return True
        arrays = self._arrays
        arrays.refresh(self._now)
        if not arrays.workers:
            return False
        tokens, step = arrays.pending_prefill_tokens, arrays.token_budget
        free = tokens <= step * STEP_FILL_SHARE
        free |= tokens <= np.minimum(step, SHORT_PROMPT_TOKENS * arrays.pending_prefills)
        free |= arrays.backlog_ms <= self._max_backlog_s * 1e3
        if excluded:
            free[arrays.indices_of(excluded)] = False
        index = int(free.argmax())
        self._free_worker = arrays.workers[index] if free[index] else None
        return self._free_worker is not None

    def next_nearly_free_s(self) -> float:
        arrays = self._arrays
        arrays.refresh(self._now)
        times = arrays.prefill_free_s[arrays.pending_prefills > 0.0] - self._max_backlog_s
        return float(times[times > self._now].min(initial=inf))


def find_cheapest(costs: Floats, count: int, tolerance: float, rng: Random) -> Indices:
    """Return the indices of the `count` lowest costs, which are fewer than all, in order of the
    index. Equal costs are chosen at random. If more than `count` costs are within `tolerance` of
    the lowest, most of the indices are a random part of those, and two are the lowest."""
    best = int(costs.argmin())
    lowest = costs[best]
    tied = np.flatnonzero(costs <= lowest + abs(lowest) * tolerance)
    if len(tied) > count:
        costs[best] = inf
        second = int(costs.argmin())
        costs[best] = lowest
        chosen = _sample(tied, count - 2, rng)
        return np.unique(np.append(chosen, (best, second)))
    chosen = _lowest(costs, count)
    highest = costs[chosen[-1]]
    equal = np.flatnonzero(costs == highest)
    below = chosen[costs[chosen] < highest]
    if len(below) + len(equal) > count:
        chosen = np.append(below, _sample(equal, count - len(below), rng))
    return np.sort(chosen)


def _lowest(costs: Floats, count: int) -> Indices:
    """Return the indices of the `count` lowest costs, lowest first. A bound from a part of the
    costs leaves few to sort; `argpartition` is slow if the costs are partly in order."""
    stride = max(1, len(costs) // BOUND_SAMPLE)
    ordered = np.sort(costs[::stride])
    low = np.flatnonzero(costs <= ordered[min(len(ordered) - 1, 2 * count // stride + 4)])
    if len(low) < count:
        low = np.arange(len(costs))
    return low[np.argsort(costs[low])[:count]]


def _sample(indices: Indices, count: int, rng: Random) -> Indices:
    """Return `count` of `indices` at equal distances from a random start."""
    distance = len(indices) / count
    positions = (np.arange(count) + rng.random()) * distance
    return indices[positions.astype(np.intp)]
