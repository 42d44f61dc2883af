"""The workers that a pending request may be placed on: their costs, and which are nearly free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from random import Random

import msgspec

from dynamo.scheduling.router.costs.interface import Cost, CostMatrix
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import WorkerStates

STEP_FILL_SHARE = 0.25
"""Share of a worker's step that pending prompts may fill before further prompts are held."""

SHORT_PROMPT_TOKENS = 512
"""Largest prompt that counts as short: a better worker would save little time."""


SelectWorker = Callable[[PendingRequest, Sequence[WorkerState], Sequence[float], Random], int]
"""Called with a request, its workers, their costs and a generator; returns the chosen index.
Raises DynamoError to refuse the request."""


class HoldLimits(msgspec.Struct, frozen=True):
    """Limits for holding a request in the router while its best worker is busy. A request is held
    if its best worker has more than `max_backlog_s` of prefill pending, for at most `max_hold_s`.
    Nothing is lost before that worker is nearly free, and another worker may become better.
    `overlaps_max_age_s` is the age at which cache overlaps are looked up again."""

    max_backlog_s: float = 0.05
    max_hold_s: float = 3.0
    overlaps_max_age_s: float = 0.1


class Candidates:
    """The candidates of every request at one time. This class computes the cost of each allowed
    worker, which is fastest where there are few. Call `begin` when time or worker states changed;
    after a placement, refresh its workers in all of `shared`."""

    def __init__(self, states: WorkerStates, cost: Cost, max_backlog_s: float) -> None:
        """A worker with at most `max_backlog_s` of pending prefill is nearly free."""
        self._states = states
        self.cost = cost
        self._max_backlog_s = max_backlog_s
        self._now = 0.0
        self._matrices: dict[AbstractSet[str], CostMatrix] = {}
        self.priced_workers = 0
        """The number of workers whose cost is computed one by one for each request."""

    def begin(self, now: float) -> None:
        """Forget all costs, and use the worker states of the time `now`."""
        self._now = now
        self._matrices.clear()
        self.priced_workers = len(self._states.workers)

    def matrix_for(self, request: PendingRequest) -> CostMatrix:
        """Return the costs of the candidates of `request`."""
        excluded = request.excluded
        if (matrix := self._matrices.get(excluded)) is None:
            workers = self.allowed_workers(excluded) if excluded else self._states.workers
            matrix = self._matrices[excluded] = self.cost.build_matrix(workers, self._now)
        return matrix

    @property
    def shared(self) -> Collection[CostMatrix]:
        """The matrices so far. Requests that exclude the same workers share one, for example those
        of a dead worker."""
        return self._matrices.values()

    def allowed_workers(self, excluded: AbstractSet[str]) -> Sequence[WorkerState]:
        """Return the workers that are not in `excluded`, by their name or instance."""
        return [worker for worker in self._states.workers if worker.names.isdisjoint(excluded)]

    def any_nearly_free(self, excluded: AbstractSet[str] = frozenset()) -> bool:
        """Whether an allowed worker is nearly free."""
        workers = self.allowed_workers(excluded) if excluded else self._states.workers
        return any(map(self.is_nearly_free, workers))

    def is_nearly_free(self, worker: WorkerState) -> bool:
        """Whether the pending prompts fill part of a step, are short and fit into one step, or take
        less than the allowed backlog."""
        tokens, step = worker.pending_prefill_tokens, worker.token_budget
        return (
            tokens <= step * STEP_FILL_SHARE
            or tokens <= min(step, SHORT_PROMPT_TOKENS * worker.pending_prefills)
            or worker.backlog_ms(self._now) <= self._max_backlog_s * 1e3
        )

    def next_nearly_free_s(self) -> float:
        """Return when the next busy worker is nearly free; infinity without a prediction."""
        earliest_s = inf
        for worker in self._states.workers:
            if worker.pending_prefills:
                free_s = worker.prefill_free_s - self._max_backlog_s
                if self._now < free_s < earliest_s:
                    earliest_s = free_s
        return earliest_s


MakeShortlist = Callable[[WorkerStates, Cost, float, Random], Candidates]
