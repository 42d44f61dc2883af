"""Costs of pairs in large deployments: arrays find the workers of lowest cost for each half."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import attrgetter

import numpy as np

from dynamo.scheduling.router.costs.interface import REGRET_WINDOW
from dynamo.scheduling.router.costs.pair_price import (
    FLEXIBLE,
    MEMORY_LIMIT,
    MEMORY_MS,
    OFF,
    THRESHOLDS,
    WAIT_MS,
    AnswerPrice,
    Fleet,
    HarmPrice,
    PairRules,
    Ways,
    price_answer,
    price_copied_token,
    price_long_pause,
)
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.router.worker_arrays import Floats, Indices, WorkerArrays
from dynamo.scheduling.workers.worker import PREFILL_SHARE_S, WorkerState
from dynamo.scheduling.workers.workers import WorkerStates

DECODERS = REGRET_WINDOW + 1
"""Decode workers in a shortlist. The placements of a window use up at most REGRET_WINDOW - 1 of
them, so the two cheapest are always known."""


class PairArrays(WorkerArrays):
    """The values of `WorkerArrays`, and those of answers. `decodes` and `prefills` are 0 or 1."""

    fields = (
        *WorkerArrays.fields,
        "decodes",
        "prefills",
        "decode_context_tokens",
        "arriving_tokens",
        "kv_capacity_tokens",
        "waits_for",
        "shared_tokens",
        "slowdown.factor",
        "prefill_busy_s",
        "prefill_busy_at_s",
        "token_transfer_ms",
        "requests",
    )
    decodes: Floats
    prefills: Floats
    decode_context_tokens: Floats
    arriving_tokens: Floats
    kv_capacity_tokens: Floats
    waits_for: Floats
    shared_tokens: Floats
    factor: Floats
    requests: Floats
    prefill_busy_s: Floats
    prefill_busy_at_s: Floats
    token_transfer_ms: Floats

    def __init__(self, states: WorkerStates) -> None:
        super().__init__(states)
        read = attrgetter(*self.fields[:-1])
        self._read = lambda worker: (*read(worker), len(worker.active))

    def decode_sensitivity(self) -> Floats:
        return self.stall_sensitivity * self.decodes

    def answer_prices(self, harm: HarmPrice) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the numbers of `answer_price` for each worker."""
        context = self.decode_context_tokens + self.arriving_tokens
        base, slope = self._decode_models()
        busy_s = self.prefill_busy_s * np.exp(
            (self.prefill_busy_at_s - self._now) / PREFILL_SHARE_S
        )
        cost, per_token = price_answer(
            harm,
            np.minimum(1.0, (busy_s + self.backlog_ms * 1e-3) / PREFILL_SHARE_S),
            self.factor * (base + slope * context),
            self.factor * slope * self.requests,
            self.token_transfer_ms * self.arriving_tokens,
        )
        free = MEMORY_LIMIT * self.kv_capacity_tokens - context + self.shared_tokens
        copied = price_copied_token(
            harm, self.token_transfer_ms, self.token_ms, self.stall_sensitivity
        )
        return cost + WAIT_MS * self.waits_for, per_token, free, copied

    def _decode_models(self) -> tuple[Floats, Floats]:
        """Return base and slope of each worker's decode steps. Every observation changes the model
        of all workers of its kind."""
        values = [(model.decode.base, model.decode.slope) for model in self._models]
        base, slope = np.array(values).T[:, self._model_of]
        return base, slope

    def _rebuild(self) -> None:
        super()._rebuild()
        models = [worker.latency_model for worker in self.workers]
        self._models = list(dict.fromkeys(models))
        order = {model: index for index, model in enumerate(self._models)}
        self._model_of = np.array([order[model] for model in models], dtype=np.intp)


class PairShortlist:
    """The cheapest workers for one request: those that compute both prompt and answer, those that
    compute the prompt for another one, and those that decode."""

    def __init__(
        self,
        rules: PairRules,
        cost: PredictedCost,
        harm: HarmPrice,
        request: PendingRequest,
        arrays: PairArrays,
        excluded: Indices | None,
        now: float,
    ) -> None:
        decodes, prefills = arrays.decodes > 0.0, arrays.prefills > 0.0
        if excluded is not None:
            decodes[excluded] = prefills[excluded] = False
        if rules.mode == OFF:
            prefills[:] = False
        only_prefills = prefills & ~decodes
        any_prefills = rules.mode == FLEXIBLE or not only_prefills.any()
        self._prefills = prefills if any_prefills else only_prefills
        tokens = request.prompt.tokens
        new = arrays.uncached_tokens(tokens, request.overlaps, request.block_tokens)
        uncached, any_prefiller = int(new.min(initial=tokens, where=decodes)), self._prefills.any()
        self.fleet = Fleet(any_prefills, bool(any_prefiller), uncached, self._count_pending)
        self._ways = Ways(local=True, remote=self.fleet.any_prefiller)
        if rules.mode != THRESHOLDS:  # which may change until the request is placed
            self._ways = rules.choose_ways(self.fleet.any_prefiller, lambda: (0, 0))
        self._prompts = cost.costs_of_all(request, arrays)
        if rules.mode != FLEXIBLE:
            prefill_ms = arrays.prefill_steps_ms(new) + arrays.token_ms * new
            sensitivity = arrays.decode_sensitivity()
            self._prompts += price_long_pause(harm.weight, sensitivity, arrays.decodes, prefill_ms)
        self._prices = base, per_token, free, _ = arrays.answer_prices(harm)
        self._answers = base + per_token * tokens + MEMORY_MS * np.clip(new - free, 0.0, new)
        self._answers[~decodes] = inf
        self._new = new
        self._arrays, self._now = arrays, now

    def choose(
        self, choose: Callable[[Floats], Indices]
    ) -> tuple[list[WorkerState], dict[int, AnswerPrice]]:
        """Return the workers, and the price of those that decode by index. `choose` returns the
        entries of the lowest costs."""
        chosen = np.unique(np.concatenate(self._choose_halves(choose)))
        workers = self._arrays.workers_at(chosen)
        prices = zip(*(values[chosen].tolist() for values in self._prices), strict=True)
        return workers, {
            index: (worker.name, *price)
            for index, (worker, price) in enumerate(zip(workers, prices, strict=True))
            if worker.decodes
        }

    def _count_pending(self) -> int:
        """Return the prompts at prefill workers after the placements so far."""
        self._arrays.refresh(self._now)
        return int(self._arrays.pending_prefills[self._prefills].sum())

    def _choose_halves(self, choose: Callable[[Floats], Indices]) -> list[Indices]:
        chosen = []
        if self._ways.local:
            chosen.append(choose(self._prompts + self._answers))
        if self._ways.remote:
            moved = self._answers + self._prices[3] * self._new
            decoders = _lowest_in_order(moved, DECODERS)
            costs = self._prompts + moved[decoders].min()
            costs[~self._prefills] = inf
            chosen += [choose(costs), decoders]
        return chosen


def _lowest_in_order(costs: Floats, count: int) -> Indices:
    """Return the indices of up to `count` lowest costs that are not infinite. Of equal costs, the
    first ones are chosen, as in `PairCostMatrix`."""
    if len(costs) > count:
        bound = np.partition(costs, count - 1)[count - 1]
        below, equal = np.flatnonzero(costs < bound), np.flatnonzero(costs == bound)
        low = np.append(below, equal[: count - len(below)])
    else:
        low = np.arange(len(costs))
    return low[costs[low] < inf]
