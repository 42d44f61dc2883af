"""Candidates of a large simulated fleet: the holders of a prompt, and the least loaded workers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from heapq import nsmallest
from math import inf
from random import Random

from dynamo.scheduling.router.costs.interface import Cost, CostMatrix
from dynamo.scheduling.router.costs.predicted import HARM_WEIGHT
from dynamo.scheduling.router.placement.candidates import Candidates
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import WorkerStates

HOLDERS = 8
"""Workers with a prefix of a prompt that are priced."""
LEAST_LOADED = 16
"""Least loaded workers that are priced, most of them without pending prompts if there are any."""
BUSY = 4
"""Workers with pending prompts that are priced in any case, and as many whose prompts are late."""
TYPICAL_TOKENS = 2_048
"""Prompt tokens by whose price workers are ordered."""
REFRESHES_PER_CALL = 2
"""Workers that a decision refreshes in turn, besides those that it prices."""

Entry = tuple[float, float, WorkerState]
"""A worker in an order: its price or time, and a random number among equals."""


class LeastLoadedCandidates(Candidates):
    """Candidates that cost no pass over all workers. Workers without pending prompts are kept in
    order of the price of a typical prompt, the others in order of the time when their prompts are
    computed. Both orders follow the workers that changed."""

    def __init__(self, states: WorkerStates, cost: Cost, max_backlog_s: float, rng: Random) -> None:
        super().__init__(states, cost, max_backlog_s)
        states.refreshes_per_call = REFRESHES_PER_CALL
        self._rng = rng
        self._least: list[WorkerState] | None = None
        self._idle: list[Entry] = []
        self._busy: list[Entry] = []
        self._prices: dict[str, float] = {}
        self._entries: dict[WorkerState, tuple[list[Entry], Entry]] = {}
        states.changed.update(states.workers)

    def begin(self, now: float) -> None:
        self._now, self._least = now, None
        self.priced_workers = HOLDERS + LEAST_LOADED

    def matrix_for(self, request: PendingRequest) -> CostMatrix:
        excluded, now = request.excluded, self._now
        workers = dict.fromkeys(self._least_loaded())
        for name in self._holders(request) if request.overlaps else ():
            if (worker := self._states.get(name)) is not None:
                workers[worker] = None
        allowed = [worker for worker in workers if worker.names.isdisjoint(excluded)]
        if not allowed:
            allowed = list(self.allowed_workers(excluded))
        for worker in allowed:
            if worker.active:
                worker.refresh(now)
        matrix = self.cost.build_matrix(allowed, now)
        matrix.allowed = len(self._states.workers)
        return matrix

    def any_nearly_free(self, excluded: AbstractSet[str] = frozenset()) -> bool:
        workers = self._least_loaded()
        if excluded:
            workers = [worker for worker in workers if worker.names.isdisjoint(excluded)]
        return any(map(self.is_nearly_free, workers))

    def next_nearly_free_s(self) -> float:
        self._update()
        at = bisect_left(self._busy, (self._now + self._max_backlog_s, inf))
        return self._busy[at][0] - self._max_backlog_s if at < len(self._busy) else inf

    def _holders(self, request: PendingRequest) -> Iterable[str]:
        """Return the holders of prefixes that are probably cheapest."""
        overlaps, prices = request.overlaps, self._prices
        if len(overlaps) <= HOLDERS:
            return overlaps
        tokens, size = request.prompt.tokens, request.block_tokens

        def price(name: str) -> float:
            return prices.get(name, inf) * (tokens - overlaps[name] * size)

        return nsmallest(HOLDERS, overlaps, price)

    def _least_loaded(self) -> list[WorkerState]:
        """Return the workers of lowest load, some of each order."""
        if self._states.changed:
            self._update()
        elif self._least is not None:
            return self._least
        entries, busy = self._idle[:LEAST_LOADED], self._busy
        if busy:
            at, count = bisect_left(busy, (self._now,)), max(BUSY, LEAST_LOADED - len(entries))
            entries += busy[max(0, at - BUSY) : at + count]
        self._least = [worker for _, _, worker in entries]
        return self._least

    def _update(self) -> None:
        """Bring the workers that changed into order."""
        changed, entries, random = self._states.changed, self._entries, self._rng.random
        if not changed:
            return
        for worker in sorted(changed, key=_name):  # else results would differ from run to run
            if worker in entries:
                order, entry = entries[worker]
                del order[bisect_left(order, entry)]
            harm = HARM_WEIGHT * worker.stall_sensitivity if worker.decodes else 0.0
            order, key = self._idle, worker.predict_prefill_ms(TYPICAL_TOKENS) * (1.0 + harm)
            self._prices[worker.name] = key + worker.backlog_ms(self._now)
            if worker.pending_prefills:
                order, key = self._busy, worker.prefill_free_s
            entry = key, random(), worker
            entries[worker] = order, entry
            insort(order, entry)
        changed.clear()


def _name(worker: WorkerState) -> str:
    return worker.name
