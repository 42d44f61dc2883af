"""Costs in predicted time: time to first token alone, or with two side effects of a prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dynamo.scheduling.router.costs.interface import TABLE_ROWS, Cost, CostMatrix, best_indices
from dynamo.scheduling.router.policy import CandidateTable
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.router.tier_loads import load_delay_ms
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.telemetry.story import Candidate

if TYPE_CHECKING:
    from dynamo.scheduling.router.worker_arrays import Floats, WorkerArrays

HARM_WEIGHT = 5.0
"""Weight of the delay that a prefill causes to decoding answers. Answers with few tokens so far
count more (`WorkerState.stall_sensitivity`)."""

EVICTION_WEIGHT = 0.5
"""Weight of recomputing blocks that may be evicted for this prompt's blocks. Free blocks are not
considered."""

WorkerRate = tuple[str, float, int, float, float, float]
"""(name, ms per token, tokens per step, ms per step, weight of a prefill with its harm, ms until a
prefill starts) of one worker. A NamedTuple would be slower to unpack in `row`."""


class PredictedCost(Cost):
    """Predicted time to first token in milliseconds, plus the harm and the eviction that a prefill
    causes."""

    joint = True
    harm_weight = HARM_WEIGHT
    has_arrays = True

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        rate, new = worker_rate(worker, now, self.harm_weight), request.uncached_tokens(worker.name)
        return predicted_terms(rate, new) | load_terms(request, worker, rate[-1], now)

    def costs_of_all(self, request: PendingRequest, arrays: WorkerArrays) -> Floats:
        new = arrays.uncached_tokens(request.prompt.tokens, request.overlaps, request.block_tokens)
        own = arrays.token_ms * new
        weight = 1.0 + self.harm_weight * arrays.decode_sensitivity()
        costs = (arrays.prefill_steps_ms(new) + own) * weight
        costs = costs + EVICTION_WEIGHT * own + arrays.backlog_ms
        if request.loads:
            arrays.add_load_delays(costs, request)
        return costs

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
        return PredictedCostMatrix(self, workers, now)


class TtftCost(Cost):
    """Predicted time to first token in milliseconds. The cost has no parameters."""

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        backlog = worker.backlog_ms(now)
        prefill = worker.predict_prefill_ms(request.uncached_tokens(worker.name))
        return {"queue": backlog, "prefill": prefill} | load_terms(request, worker, backlog, now)


class PredictedCostMatrix(CostMatrix):
    """The matrix of `PredictedCost`, computed from one `WorkerRate` for each worker."""

    def __init__(self, cost: PredictedCost, workers: Sequence[WorkerState], now: float) -> None:
        self.workers = workers
        self._now = now
        self._cost = cost
        self._harm_weight = cost.harm_weight
        self._rates = [worker_rate(worker, now, cost.harm_weight) for worker in workers]

    def row(self, request: PendingRequest) -> list[float]:
        tokens, size, eviction = request.prompt.tokens, request.block_tokens, EVICTION_WEIGHT
        overlap = request.overlaps.get
        costs = [  # the terms written out: this runs once for each worker and request
            ((step if new <= budget else -(-new // budget) * step) + own) * weight
            + eviction * own
            + wait
            for name, token, budget, step, weight, wait in self._rates
            for left in [tokens - overlap(name, 0) * size]
            for new in [left if left > 0 else 1]
            for own in [token * new]
        ]
        if request.loads:
            for index, worker in enumerate(self.workers):
                costs[index] += self._load_delay_ms(request, index, worker)
        return costs

    def refresh_worker(self, worker: WorkerState) -> int | None:
        index = super().refresh_worker(worker)
        if index is not None:
            self._rates[index] = worker_rate(worker, self._now, self._harm_weight)
        return index

    def add_worker(self, worker: WorkerState) -> None:
        super().add_worker(worker)
        self._rates.append(worker_rate(worker, self._now, self._harm_weight))

    def column(self, requests: Sequence[PendingRequest], index: int) -> list[float]:
        name, token, budget, step, weight, wait = self._rates[index]
        costs = []
        for request in requests:
            new = request.prompt.tokens
            if name in request.overlaps:
                new = max(1, new - request.overlaps[name] * request.block_tokens)
            own = token * new
            cost = (-(-new // budget) * step + own) * weight + EVICTION_WEIGHT * own + wait
            if request.loads:
                cost += self._load_delay_ms(request, index, self.workers[index])
            costs.append(cost)
        return costs

    def _load_delay_ms(self, request: PendingRequest, index: int, worker: WorkerState) -> float:
        return load_delay_ms(request, worker, self._rates[index][-1], self._now)

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], chosen: int
    ) -> CandidateTable:
        if request.loads:  # the queues of tiers change
            return super().candidate_table(request, costs, chosen)
        rates, overlaps = self._rates, request.overlaps
        if len(rates) > TABLE_ROWS:
            order = best_indices(costs, chosen)
            rates = [rates[index] for index in order]
            costs = [costs[index] for index in order]
            overlaps = {rate[0]: overlaps[rate[0]] for rate in rates if rate[0] in overlaps}
        else:
            rates = rates.copy()
        tokens, size = request.prompt.tokens, request.block_tokens
        return partial(_build_candidates, tokens, size, overlaps, rates, costs)


def _build_candidates(
    prompt_tokens: int,
    block_tokens: int,
    overlaps: Mapping[str, int],
    rates: Sequence[WorkerRate],
    costs: Sequence[float],
) -> list[Candidate]:
    """Return the candidates, best first."""
    candidates = []
    for rate, cost in zip(rates, costs, strict=True):
        overlap = overlaps.get(rate[0], 0)
        new = max(1, prompt_tokens - overlap * block_tokens)
        candidates.append(Candidate(rate[0], overlap, cost, predicted_terms(rate, new)))
    return sorted(candidates, key=lambda candidate: candidate.cost)


def worker_rate(worker: WorkerState, now: float, harm_weight: float = HARM_WEIGHT) -> WorkerRate:
    """Return the rate of `worker` at the time `now`. The wait is its `backlog_ms`, written out. A
    prefill harms no answer at a worker that writes none."""
    wait = abs(worker.prefill_free_s - now) * 1e3 if worker.pending_prefills else 0.0
    weight = 1.0 + harm_weight * worker.stall_sensitivity if worker.decodes else 1.0
    return worker.name, worker.token_ms, worker.token_budget, worker.step_ms, weight, wait


def load_terms(
    request: PendingRequest, worker: WorkerState, backlog_ms: float, now: float
) -> dict[str, float]:
    """Return the term for the time in which `worker` still loads blocks after its backlog, if any
    worker would load blocks of the prompt."""
    if not request.loads:
        return {}
    return {"load": load_delay_ms(request, worker, backlog_ms, now)}


def predicted_terms(rate: WorkerRate, new: int) -> dict[str, float]:
    """Return the terms of a prompt with `new` uncached tokens, by name."""
    _, token, budget, step, weight, wait = rate
    service = -(-new // budget) * step + token * new
    return {
        "queue": wait,
        "prefill": service,
        "harm": service * (weight - 1.0),
        "eviction": EVICTION_WEIGHT * (token * new),
    }
