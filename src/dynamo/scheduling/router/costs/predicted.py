"""Costs in predicted time: time to first token alone, or with two side effects of a prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from dynamo.scheduling.router.costs.interface import TABLE_ROWS, Cost, CostMatrix, best_indices
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.policy import Candidate
from dynamo.scheduling.router.worker_state import WorkerState

WorkerRate = tuple[str, float, int, float, float, float]
"""(name, ms per token, tokens per step, ms per step, weight of a prefill with its harm, ms until a
prefill starts) of one worker."""


class PredictedCost(Cost):
    """Predicted time to first token in milliseconds, plus the harm and the eviction that a prefill
    causes.

    Harm: the prefill delays the answers that the worker decodes; young answers suffer most.
    Eviction: a duplicate of a block displaces another block, which must be computed again.
    """

    joint = True

    def __init__(self, harm: float = 5.0, eviction: float = 0.5) -> None:
        self._harm = harm
        self._eviction = eviction

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        rate = worker_rate(worker, self._harm, now)
        return predicted_terms(rate, request.uncached_tokens(worker.name), self._eviction)

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
        return PredictedCostMatrix(workers, now, self._harm, self._eviction)


class TtftCost(Cost):
    """Predicted time to first token in milliseconds. The cost has no parameters."""

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        prefill = worker.predict_prefill_ms(request.uncached_tokens(worker.name))
        return {"queue": worker.backlog_ms(now), "prefill": prefill}

    def cost(self, request: PendingRequest, worker: WorkerState, now: float) -> float:
        return worker.backlog_ms(now) + worker.predict_prefill_ms(
            request.uncached_tokens(worker.name)
        )


class PredictedCostMatrix(CostMatrix):
    """The matrix of `PredictedCost`, computed from one `WorkerRate` for each worker."""

    def __init__(
        self, workers: Sequence[WorkerState], now: float, harm: float, eviction: float
    ) -> None:
        self.workers = workers
        self._now = now
        self._harm = harm
        self._eviction = eviction
        self._rates = [worker_rate(worker, harm, now) for worker in workers]

    def row(self, request: PendingRequest) -> list[float]:
        tokens, size, eviction = request.prompt.tokens, request.block_tokens, self._eviction
        overlap = request.overlaps.get
        return [  # the terms written out: this runs once for each worker and request
            ((step if new <= budget else -(-new // budget) * step) + own) * weight
            + eviction * own
            + wait
            for name, token, budget, step, weight, wait in self._rates
            for left in [tokens - overlap(name, 0) * size]
            for new in [left if left > 0 else 1]
            for own in [token * new]
        ]

    def refresh_worker(self, worker: WorkerState) -> int | None:
        index = super().refresh_worker(worker)
        if index is not None:
            self._rates[index] = worker_rate(worker, self._harm, self._now)
        return index

    def column(self, requests: Sequence[PendingRequest], index: int) -> list[float]:
        name, token, budget, step, weight, wait = self._rates[index]
        eviction = self._eviction
        costs = []
        for request in requests:
            new = request.prompt.tokens
            if name in request.overlaps:
                new = max(1, new - request.overlaps[name] * request.block_tokens)
            own = token * new
            costs.append((-(-new // budget) * step + own) * weight + eviction * own + wait)
        return costs

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], chosen: int
    ) -> Sequence[Candidate]:
        rates, overlaps = self._rates, request.overlaps
        if len(rates) > TABLE_ROWS:
            order = best_indices(costs, chosen)
            rates = [rates[index] for index in order]
            costs = [costs[index] for index in order]
            overlaps = {rate[0]: overlaps[rate[0]] for rate in rates if rate[0] in overlaps}
        else:
            rates = rates.copy()
        return LazyCandidateTable(request, overlaps, rates, costs, self._eviction)


class LazyCandidateTable(Sequence[Candidate]):
    """A candidate table that is built at the first access, since most tables are never read."""

    __slots__ = (
        "_block_tokens",
        "_candidates",
        "_costs",
        "_eviction",
        "_overlaps",
        "_prompt_tokens",
        "_rates",
    )

    def __init__(
        self,
        request: PendingRequest,
        overlaps: Mapping[str, int],
        rates: Sequence[WorkerRate],
        costs: Sequence[float],
        eviction: float,
    ) -> None:
        self._overlaps = overlaps
        self._prompt_tokens = request.prompt.tokens
        self._block_tokens = request.block_tokens
        self._rates = rates
        self._costs = costs
        self._eviction = eviction
        self._candidates: tuple[Candidate, ...] | None = None

    def __len__(self) -> int:
        return len(self._costs)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if self._candidates is None:
            self._candidates = tuple(sorted(self._build_candidates(), key=lambda row: row.cost))
        return self._candidates[index]

    def _build_candidates(self) -> Iterator[Candidate]:
        for rate, cost in zip(self._rates, self._costs, strict=True):
            overlap = self._overlaps.get(rate[0], 0)
            new = max(1, self._prompt_tokens - overlap * self._block_tokens)
            yield Candidate(rate[0], overlap, cost, predicted_terms(rate, new, self._eviction))


def worker_rate(worker: WorkerState, harm: float, now: float) -> WorkerRate:
    """Return the rate of `worker` at the time `now`."""
    wait = abs(worker.prefill_free_s - now) * 1e3 if worker.pending_prefills else 0.0
    weight = 1.0 + harm * worker.stall_sensitivity
    return worker.name, worker.token_ms, worker.token_budget, worker.step_ms, weight, wait


def predicted_terms(rate: WorkerRate, new: int, eviction: float) -> dict[str, float]:
    """Return the terms of a prompt with `new` uncached tokens, by name."""
    _, token, budget, step, weight, wait = rate
    service = -(-new // budget) * step + token * new
    return {
        "queue": wait,
        "prefill": service,
        "harm": service * (weight - 1.0),
        "eviction": eviction * (token * new),
    }
