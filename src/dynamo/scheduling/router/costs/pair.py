"""The cost of a pair: a prefill worker that computes the prompt, and a worker that decodes.

A pair costs what the prompt costs at the prefill worker, plus what the answer costs at the decode
worker, plus the transfer between them. The parts are independent. So the best decode worker is the
same for nearly every prefill worker, and a decision needs two passes over the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.scheduling.router.costs.interface import CostMatrix, best_indices
from dynamo.scheduling.router.costs.pair_price import (
    FIXED_HARM,
    FLEXIBLE,
    FLEXIBLE_TRANSFERS,
    HELD_BACKLOG_MS,
    TARGET_QUEUE_WEIGHT,
    AnswerPrice,
    Fleet,
    HarmPrice,
    PairRules,
    SharedPrompts,
    Ways,
    answer_cost,
    answer_price,
    price_long_pause,
    queued_prefill_ms,
)
from dynamo.scheduling.router.costs.predicted import (
    PredictedCost,
    PredictedCostMatrix,
    WorkerRate,
    predicted_terms,
)
from dynamo.scheduling.router.harm_steering import START_WEIGHT, HarmSteering
from dynamo.scheduling.router.policy import CandidateTable
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.telemetry.story import Candidate

if TYPE_CHECKING:
    from dynamo.scheduling.router.worker_arrays import Floats, Indices, WorkerArrays
    from dynamo.scheduling.workers.workers import WorkerStates

CostAt = tuple[float, int]
"""A cost and the index of its worker."""


class PairCost(PredictedCost):
    """Predicted cost of a prompt at one worker and of its answer at another or the same."""

    def __init__(self, settings: DisaggregationSettings) -> None:
        self.rules = PairRules(settings)
        self.steering = HarmSteering()
        self.removed_blocks: RemovedBlocks | None = None
        self._asked_share = 0.0
        self._shared_prompts = SharedPrompts()
        self.queue_ms = 0.0
        self.harm: HarmPrice
        self._update_target(settings)

    def begin_round(
        self, requests: Iterable[PendingRequest], workers: Sequence[WorkerState], now: float
    ) -> None:
        flexible = self.rules.mode == FLEXIBLE
        if self.removed_blocks is not None:
            self._asked_share = self.removed_blocks.asked_share
        weight = TARGET_QUEUE_WEIGHT if self.steering.itl_slo_ms else 1.0
        self.queue_ms = weight * queued_prefill_ms(requests, workers, now) if flexible else 0.0

    def costs_of_all(self, request: PendingRequest, arrays: WorkerArrays) -> Floats:
        costs = super().costs_of_all(request, arrays)
        return costs + self.queue_ms * (arrays.backlog_ms > HELD_BACKLOG_MS)

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
        self._update_harm()
        return PairCostMatrix(self, workers, now)

    def predict_ms(
        self, workers: Sequence[WorkerState], tokens: int, ahead: int, now: float
    ) -> float:
        """Return the milliseconds to the first token at the worker that would compute a prompt of
        `tokens` uncached tokens. `ahead` such prompts are not placed yet; each role is priced as if
        all of them went there. Infinite if no worker may take the prompt."""
        request = PendingRequest("", Prompt(tokens, ()), 1, now)
        costs = self.build_matrix(workers, now).row(request)
        decoding = sum(worker.decodes for worker in workers)
        best = inf, inf
        for worker, cost in zip(workers, costs, strict=True):
            alike = decoding if worker.decodes else len(workers) - decoding
            prefill_ms = worker.predict_prefill_ms(tokens)
            ahead_ms = prefill_ms * ahead / alike
            if cost < inf:
                best = min(best, (cost + ahead_ms, worker.backlog_ms(now) + prefill_ms + ahead_ms))
        return best[1]

    def make_arrays(self, states: WorkerStates) -> WorkerArrays:
        from dynamo.scheduling.router.costs.pair_arrays import PairArrays

        return PairArrays(states)

    def build_shortlist(
        self,
        request: PendingRequest,
        arrays: WorkerArrays,
        excluded: Indices | None,
        choose: Callable[[Floats], Indices],
        now: float,
    ) -> CostMatrix:
        from dynamo.scheduling.router.costs.pair_arrays import PairArrays, PairShortlist

        self._update_harm()
        assert isinstance(arrays, PairArrays)  # noqa: S101 - from `make_arrays`
        shortlist = PairShortlist(self.rules, self, self.harm, request, arrays, excluded, now)
        workers, prices = shortlist.choose(choose)
        return PairCostMatrix(self, workers, now, shortlist.fleet, prices)

    def on_placed(self, placed: PlacedRequest) -> None:
        if self.removed_blocks is not None:
            cached_share = 1.0 - placed.new_tokens / placed.prompt_tokens
            self.removed_blocks.on_prompt(placed.hashes, cached_share)
            self._shared_prompts.add(placed)

    def on_ended(self, placed: PlacedRequest) -> None:
        self._shared_prompts.remove(placed)

    def _update_harm(self) -> None:
        itl_slo_ms = self.steering.itl_slo_ms
        local = self.rules.mode == FLEXIBLE and not itl_slo_ms
        transfers = FLEXIBLE_TRANSFERS if local else 1.0
        self.harm = HarmPrice(self.steering.weight, itl_slo_ms, transfers, self._asked_share)
        self.harm_weight = self.harm.weight

    def update_settings(self, settings: RouterSettings) -> None:
        self.rules.update_settings(settings.disaggregation)
        self._update_target(settings.disaggregation)

    def _update_target(self, settings: DisaggregationSettings) -> None:
        flexible = self.rules.mode == FLEXIBLE
        if flexible != (self.removed_blocks is not None):
            self.removed_blocks = RemovedBlocks() if flexible else None
            self._asked_share = 0.0
        itl_slo_ms = settings.itl_slo if flexible else 0.0
        self.steering.update_target(itl_slo_ms, START_WEIGHT if flexible else FIXED_HARM)


class PairCostMatrix(PredictedCostMatrix):
    """A column for each worker that may compute the prompt. `decode_index` completes the pair."""

    has_pairs = True

    def __init__(
        self,
        cost: PairCost,
        workers: Sequence[WorkerState],
        now: float,
        fleet: Fleet | None = None,
        prices: dict[int, AnswerPrice] | None = None,
    ) -> None:
        """`workers` are all that are allowed, or some of a `fleet`. `prices`: those of the workers
        that decode, by index, if they are known."""
        self._queue_ms, self._harm = cost.queue_ms, cost.harm
        super().__init__(cost, workers, now)
        if self._queue_ms:
            for index in range(len(workers)):
                self._add_queue(index)
        self._rules = cost.rules
        self._fleet = fleet
        if fleet is not None:
            any_prefills = fleet.any_prefills
        else:
            any_prefills = cost.rules.mode == FLEXIBLE or all(worker.decodes for worker in workers)
        self._any_prefills = any_prefills
        self._prices = prices or {
            index: answer_price(cost.harm, worker, now)
            for index, worker in enumerate(workers)
            if worker.decodes
        }
        prefills = cost.rules.is_prefiller
        self._prefillers = [
            index for index, worker in enumerate(workers) if prefills(worker, any_prefills)
        ]
        self._last_best: BestDecoders | None = None

    def row(self, request: PendingRequest) -> list[float]:
        prompt_costs = super().row(request)
        if self._rules.mode != FLEXIBLE:
            for at in self._prices:
                prompt_costs[at] += self._long_pause_cost(request, at)
        row = [inf] * len(prompt_costs)
        local, remote = self._ways(request)
        if local:
            for at, answer in self._answer_costs(request):
                row[at] = prompt_costs[at] + answer
        if remote:
            (best, best_at), (second, _) = self._best_decoders(request)
            for at in self._prefillers:
                cost = prompt_costs[at] + (second if best_at == at else best)
                if cost < row[at]:
                    row[at] = cost
        return row

    def column(self, requests: Sequence[PendingRequest], index: int) -> list[float]:
        return [self.row(request)[index] for request in requests]

    def refresh_worker(self, worker: WorkerState) -> int | None:
        index = super().refresh_worker(worker)
        self._last_best = None
        if self._queue_ms and index is not None:
            self._add_queue(index)
        if index in self._prices:
            self._prices[index] = answer_price(self._harm, worker, self._now)
        return index

    def _add_queue(self, index: int) -> None:
        """Add the wait behind pending requests to that of a worker that gets no prompt at once."""
        name, token_ms, budget, step_ms, weight, wait_ms = self._rates[index]
        if wait_ms > HELD_BACKLOG_MS:
            wait_ms += self._queue_ms
            self._rates[index] = name, token_ms, budget, step_ms, weight, wait_ms

    def add_worker(self, worker: WorkerState) -> None:
        index = len(self.workers)
        super().add_worker(worker)
        self._last_best = None
        if self._queue_ms:
            self._add_queue(index)
        if worker.decodes:
            self._prices[index] = answer_price(self._harm, worker, self._now)
        if self._rules.is_prefiller(worker, self._any_prefills):
            self._prefillers.append(index)

    def decode_index(self, request: PendingRequest, index: int) -> int:
        return self._complete_pairs(request, [index])[0][1]

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], chosen: int
    ) -> CandidateTable:
        indices = [at for at in best_indices(costs, chosen) if costs[at] < inf]
        size, overlaps = request.block_tokens, request.overlaps
        rows: list[PairRow] = []
        pairs = self._complete_pairs(request, indices)
        for index, (answer, decode_index, transfer) in zip(indices, pairs, strict=True):
            rate, worker = self._rates[index], self.workers[index]
            decode_worker = "" if decode_index == index else self.workers[decode_index].name
            terms = {"decode": answer, "transfer": transfer}
            if request.loads:
                terms["load"] = self._load_delay_ms(request, index, worker)
            if self._rules.mode != FLEXIBLE and index in self._prices:
                terms["harm"] = self._long_pause_cost(request, index)
            overlap, blocks = overlaps.get(worker.name, 0), request.tier_blocks(worker.name)
            rows.append((rate, overlap, costs[index], decode_worker, terms, blocks))
        return partial(_build_candidates, request.prompt.tokens, size, rows)

    def _long_pause_cost(self, request: PendingRequest, index: int) -> float:
        worker = self.workers[index]
        prefill_ms = worker.predict_prefill_ms(request.uncached_tokens(worker.name))
        return price_long_pause(self._harm.weight, worker.stall_sensitivity, 1.0, prefill_ms)

    def _ways(self, request: PendingRequest) -> Ways:
        fleet, tokens = self._fleet, request.prompt.tokens

        def queue() -> tuple[int, int]:
            uncached = [request.uncached_tokens(self.workers[at].name) for at in self._prices]
            if fleet is not None:
                return min([fleet.uncached_tokens, *uncached]), fleet.pending()
            pending = sum(self.workers[at].pending_prefills for at in self._prefillers)
            return min(uncached, default=tokens), pending

        any_prefiller = bool(self._prefillers) if fleet is None else fleet.any_prefiller
        return self._rules.choose_ways(any_prefiller, queue)

    def _complete_pairs(
        self, request: PendingRequest, indices: Sequence[int]
    ) -> list[tuple[float, int, float]]:
        """Return (cost of the answer, index of its worker, cost of the transfer) for each of
        `indices`, a worker that computes the prompt."""
        local, remote = self._ways(request)
        best, second = self._best_decoders(request) if remote else (NO_COST, NO_COST)
        _, best_at = best
        prices, prefillers, tokens = self._prices, set(self._prefillers), request.prompt.tokens
        pairs = []
        for index in indices:
            moved, at = second if best_at == index else best
            answer = inf
            if local and index in prices:
                new = request.uncached_tokens(self.workers[index].name)
                answer = answer_cost(prices[index], tokens, new)
            if answer <= moved or index not in prefillers:
                pairs.append((answer, index, 0.0))
            else:
                transfer = _transfer_cost(request, prices[at])
                pairs.append((moved - transfer, at, transfer))
        return pairs

    def _answer_costs(self, request: PendingRequest) -> list[tuple[int, float]]:
        """Return (index of a decode worker, cost of the answer there) for all of them."""
        tokens, uncached = request.prompt.tokens, request.uncached_tokens
        return [
            (at, answer_cost(price, tokens, uncached(price[0])))
            for at, price in self._prices.items()
        ]

    def _best_decoders(self, request: PendingRequest) -> tuple[CostAt, CostAt]:
        """Return the two cheapest decode workers for a prompt that is moved. The last result is
        remembered until a worker changes."""
        overlaps = request.overlaps
        if self._last_best is not None:
            last_request, last_overlaps, pair = self._last_best
            if last_request is request and last_overlaps is overlaps:
                return pair
        best_cost, best_at = second_cost, second_at = NO_COST
        tokens = request.prompt.tokens
        for at, price in self._prices.items():
            name, _, _, _, token_transfer = price
            moved = request.uncached_tokens(name) if name in overlaps else tokens
            cost = answer_cost(price, tokens, moved) + token_transfer * moved
            if cost < best_cost:
                second_cost, second_at = best_cost, best_at
                best_cost, best_at = cost, at
            elif cost < second_cost:
                second_cost, second_at = cost, at
        pair = (best_cost, best_at), (second_cost, second_at)
        self._last_best = request, overlaps, pair
        return pair


def _transfer_cost(request: PendingRequest, price: AnswerPrice) -> float:
    """Return what copying the blocks costs that a decode worker lacks."""
    name, _, _, _, token_transfer = price
    return token_transfer * request.uncached_tokens(name)


NO_COST: CostAt = inf, -1

BestDecoders = tuple[PendingRequest, Mapping[str, int], tuple[CostAt, CostAt]]
"""(request, overlaps, its two cheapest decode workers)."""

PairRow = tuple[WorkerRate, int, float, str, dict[str, float], dict[str, int]]
"""(rate of the prefill worker, its overlap, cost of the pair, decode worker, terms that add to
those of the rate, tier -> blocks to load)."""


def _build_candidates(tokens: int, block_tokens: int, rows: Sequence[PairRow]) -> list[Candidate]:
    candidates = []
    for rate, overlap, cost, decode_worker, more, tier_blocks in rows:
        terms = predicted_terms(rate, max(1, tokens - overlap * block_tokens))
        more["harm"] = terms["harm"] + more.get("harm", 0.0)
        terms |= more
        name, *_ = rate
        candidates.append(Candidate(name, overlap, cost, terms, decode_worker, tier_blocks))
    return candidates
