"""The cost of a pair: a prefill worker that computes the prompt, and a worker that decodes.

A pair costs what the prompt costs at the prefill worker, plus what the answer costs at the decode
worker, plus the transfer between them. The parts are independent. So the best decode worker is the
same for nearly every prefill worker, and a decision needs two passes over the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.scheduling.router.costs.interface import CostMatrix, best_indices
from dynamo.scheduling.router.costs.predicted import (
    PredictedCost,
    PredictedCostMatrix,
    predicted_terms,
    worker_rate,
)
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.policy import Candidate
from dynamo.scheduling.router.roles import DisaggregationRouter
from dynamo.scheduling.router.worker_state import WorkerState

OFF, ALWAYS, THRESHOLDS, FLEXIBLE = "off", "always", "thresholds", "flexible"
"""Modes of disaggregation; all others compare both ways."""

FLEXIBLE_HARM = 15.0
"""Price of a pause for answers in mode flexible, as `predicted.HARM_WEIGHT`. Lower prices mix
prefill into workers that decode: shorter waits and longer gaps. Source: replays of the
conversation trace with 8 flexible workers. At 15 the 99.9th percentile of gaps is a quarter of
that of 8 separate workers. The first token takes 1 % longer, the whole answer 1.5 %."""

FIXED_HARM = 200.0
"""The price in the other modes, where decode workers should rarely compute prompts. Source: the
same trace with 4 prefill and 4 decode workers; 15 to 1,000 tried."""

PREFILL_SHARE_WEIGHT = 40.0
"""Weight of the share of its time that a decode worker spent on prompts, in units of the harm."""

STEP_WEIGHT = 0.34
"""Weight of a decode step in milliseconds, in units of the harm."""

TRANSFER_WEIGHT = 0.2
"""Share of a transfer that is not hidden behind the computing of later chunks."""

ARRIVAL_WEIGHT = 0.02
"""Share of the transfers in front of a transfer, which spreads a burst over equal workers. With ten
times more, the end-to-end time of the conversation trace grows by 4 %."""

MEMORY_LIMIT = 0.9
"""Share of KV memory beyond which each token of a prompt costs `MEMORY_MS`."""
MEMORY_MS = 1.0
TOKEN_TRANSFER_MS = 131_072 / 8e9 * 1e3
"""Time to move the KV of one token: 128 KiB at 8 GB/s."""


class DecodePrice(NamedTuple):
    """The price of an answer at one decode worker: `base`, `per_token` of its prompt, and the
    prompt tokens that still fit into its memory."""

    name: str
    base: float
    per_token: float
    free_tokens: float


class PairCost(PredictedCost):
    """Predicted cost of a prompt at one worker and of its answer at another or the same."""

    has_arrays = False

    def __init__(self, settings: DisaggregationSettings) -> None:
        self.thresholds = DisaggregationRouter()
        self._apply(settings)

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
        return PairCostMatrix(self, workers, now)

    def decode_price(self, worker: WorkerState, now: float) -> DecodePrice:
        """Return the price of an answer at `worker`. Prompts that already arrive there delay the
        transfer of the next one."""
        harm = self.harm_weight
        context = worker.decode_context_tokens + worker.arriving_tokens
        model, factor = worker.latency_model.decode, worker.slowdown.factor
        share = PREFILL_SHARE_WEIGHT * worker.prefill_share(now)
        queue = ARRIVAL_WEIGHT * TOKEN_TRANSFER_MS * worker.arriving_tokens
        return DecodePrice(
            worker.name,
            queue + harm * (share + STEP_WEIGHT * factor * model.predict(1.0, context)),
            harm * STEP_WEIGHT * factor * model.slope * len(worker.active),
            MEMORY_LIMIT * worker.kv_capacity_tokens - context,
        )

    def update_settings(self, settings: RouterSettings) -> None:
        self._apply(settings.disaggregation)

    def _apply(self, settings: DisaggregationSettings) -> None:
        self.mode = settings.effective_mode
        self.harm_weight = FLEXIBLE_HARM if self.mode == FLEXIBLE else FIXED_HARM
        self.thresholds.update_settings(settings)


class PairCostMatrix(PredictedCostMatrix):
    """A column for each worker that may compute the prompt. `decode_index` completes the pair."""

    has_pairs = True

    def __init__(self, cost: PairCost, workers: Sequence[WorkerState], now: float) -> None:
        super().__init__(cost, workers, now)
        self._pair_cost = cost
        self._decoders = [at for at, worker in enumerate(workers) if worker.decodes]
        self._prices = {at: cost.decode_price(workers[at], now) for at in self._decoders}
        others = [at for at, worker in enumerate(workers) if not worker.decodes]
        if cost.mode == FLEXIBLE or not others:
            others = [at for at, worker in enumerate(workers) if worker.prefills]
        self._prefillers = [] if cost.mode == OFF else others

    def row(self, request: PendingRequest) -> list[float]:
        prompt_costs = super().row(request)
        row = [inf] * len(prompt_costs)
        local, remote = self._ways(request)
        if local:
            for at, price in zip(self._decoders, self._local_costs(request), strict=True):
                row[at] = prompt_costs[at] + price
        if remote:
            best, second = self._best_decoders(request)
            for at in self._prefillers:
                cost = prompt_costs[at] + (second if best[1] == at else best)[0]
                if cost < row[at]:
                    row[at] = cost
        return row

    def column(self, requests: Sequence[PendingRequest], index: int) -> list[float]:
        return [self.row(request)[index] for request in requests]

    def refresh_worker(self, worker: WorkerState) -> int | None:
        index = super().refresh_worker(worker)
        if index in self._prices:
            self._prices[index] = self._pair_cost.decode_price(worker, self._now)
        return index

    def decode_index(self, request: PendingRequest, index: int) -> int:
        local, remote = self._ways(request)
        if not remote or index not in self._prefillers:
            return index
        best, second = self._best_decoders(request)
        cost, at = second if best[1] == index else best
        if cost == inf:
            return index
        if local and (price := self._prices.get(index)):
            own = _answer_costs(request.prompt.tokens, [price])[0]
            if own <= cost:
                return index
        return at

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], chosen: int
    ) -> Sequence[Candidate]:
        indices = [at for at in best_indices(costs, chosen) if costs[at] < inf]
        return tuple(self._candidate(request, at, costs[at]) for at in indices)

    def _candidate(self, request: PendingRequest, index: int, cost: float) -> Candidate:
        worker = self.workers[index]
        rate = worker_rate(worker, self._now, self._pair_cost.harm_weight)
        terms = predicted_terms(rate, request.uncached_tokens(worker.name))
        at = self.decode_index(request, index)
        decode_worker = "" if at == index else self.workers[at].name
        if price := self._prices.get(at):
            terms["decode"] = _answer_costs(request.prompt.tokens, [price])[0]
            terms["transfer"] = self._transfer_costs(request, [price])[0] if decode_worker else 0.0
        overlap = request.overlaps.get(worker.name, 0)
        return Candidate(worker.name, overlap, cost, terms, decode_worker)

    def _ways(self, request: PendingRequest) -> tuple[bool, bool]:
        """Return whether a decode worker and whether a prefill worker may compute the prompt."""
        mode = self._pair_cost.mode
        if not self._prefillers:
            return True, False
        if mode == ALWAYS:
            return False, True
        if mode != THRESHOLDS:
            return True, True
        overlaps = [request.overlaps.get(price.name, 0) for price in self._prices.values()]
        uncached = request.prompt.tokens - max(overlaps, default=0) * request.block_tokens
        pending = sum(self.workers[at].pending_prefills for at in self._prefillers)
        remote = self._pair_cost.thresholds.exceeds_thresholds(uncached, pending)
        return not remote, remote

    def _best_decoders(
        self, request: PendingRequest
    ) -> tuple[tuple[float, int], tuple[float, int]]:
        """Return (cost, index) of the two cheapest decode workers for a prompt that is moved."""
        prices = list(self._prices.values())
        best = second = (inf, -1)
        own, moved = self._local_costs(request), self._transfer_costs(request, prices)
        for at, answer, transfer in zip(self._decoders, own, moved, strict=True):
            cost = answer + transfer
            if cost < best[0]:
                best, second = (cost, at), best
            elif cost < second[0]:
                second = (cost, at)
        return best, second

    def _local_costs(self, request: PendingRequest) -> list[float]:
        return _answer_costs(request.prompt.tokens, self._prices.values())

    def _transfer_costs(
        self, request: PendingRequest, prices: Iterable[DecodePrice]
    ) -> list[float]:
        """Return what moving the blocks that a decode worker lacks costs, for each of `prices`."""
        tokens, size, overlap = request.prompt.tokens, request.block_tokens, request.overlaps.get
        per_token = TRANSFER_WEIGHT * TOKEN_TRANSFER_MS
        return [per_token * max(0, tokens - overlap(price.name, 0) * size) for price in prices]


def _answer_costs(tokens: int, prices: Iterable[DecodePrice]) -> list[float]:
    """Return the cost of an answer to a prompt of `tokens`, for each of `prices`."""
    return [
        base + per_token * tokens + (MEMORY_MS * (tokens - free) if tokens > free else 0.0)
        for _, base, per_token, free in prices
    ]
