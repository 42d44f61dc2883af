"""The workers that compute prompts, which may be others than those that answer."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.router.costs.pair_price import PairRules
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState

ROUNDING_MS = 1e-6


class PromptWorkers:
    """Predict the time from a slot to the first token, at the workers that compute the prompt.

    `prefill_client` has the workers that only compute prompts. Without them, or if the mode of
    disaggregation does not use them, the workers that answer compute their prompts. A policy that
    predicts compares pairs of workers by prices.

    A prompt longer than those that were measured lately is predicted from them while no other such
    prompt is pending. Then they tell only how long it may take at most.
    """

    def __init__(
        self, ledger: Ledger, prefill_client: Client | None, policy: Policy | None
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._policy_models = ledger.models_prompts
        self.policy_predicts = policy is not None and policy.predicts
        self._prefill_client = prefill_client
        self._rules = PairRules(DisaggregationSettings())
        self._prefill_workers: list[WorkerState] = []
        self._excess_ms: dict[str, float] = {}

    def update(self, settings: DisaggregationSettings, *, limited: bool) -> None:
        """Apply reloaded settings and changed instances. `limited`: there is a limit of the time to
        the first token, so that the ledger must model prompts."""
        self._rules.update_settings(settings)
        self._ledger.models_prompts = self._policy_models or limited
        others = self._prefill_client.instances if self._prefill_client is not None else {}
        self._prefill_workers = [
            worker
            for worker in self._ledger.workers.workers
            if self._ledger.models_prompts
            and worker.instance.id in others
            and self._rules.is_prefiller(worker, False)
        ]

    def remote(self, tokens: int) -> Sequence[WorkerState]:
        """Return the prefill workers that may compute a prompt of `tokens` uncached tokens."""
        return self._prefill_workers if self._ways(tokens)[1] else ()

    def add_excess(self, placed: PlacedRequest, tokens: int) -> None:
        """Count how much longer than predicted a prompt of `tokens` uncached tokens may take at its
        worker, until `remove_excess`."""
        placed.excess_ms = excess_ms = _excess_ms(placed.prompt_worker, tokens)
        if excess_ms:
            worker = placed.prompt_worker.name
            self._excess_ms[worker] = self._excess_ms.get(worker, 0.0) + excess_ms

    def remove_excess(self, placed: PlacedRequest) -> None:
        """Remove what `add_excess` has counted."""
        worker, excess_ms = placed.prompt_worker.name, placed.excess_ms
        placed.excess_ms = 0.0
        left_ms = self._excess_ms.pop(worker, 0.0) - excess_ms
        if left_ms > ROUNDING_MS:
            self._excess_ms[worker] = left_ms

    def predict_ms(
        self,
        answering: Sequence[WorkerState],
        tokens: int,
        ahead: int,
        sufficient_ms: float,
        now: float,
    ) -> float:
        """Return the milliseconds at the best worker, or the first one within `sufficient_ms`.
        `ahead` prompts are on their way to some worker, too. `answering` are the workers that could
        answer. Infinite without any worker."""
        if self._ledger.models_prompts and not self.policy_predicts:
            self._ledger.workers.refresh_next(now)
        local, remote = self._ways(tokens)
        best_ms = inf
        if remote:
            best_ms = self._quickest_ms(self._prefill_workers, tokens, ahead, sufficient_ms, now)
        if not local or best_ms <= sufficient_ms:
            return best_ms
        workers = [*self._prefill_workers, *answering] if remote else answering
        if (policy := self._policy) is not None:
            pair_ms = policy.predict_pair_ms(workers, tokens, ahead, now)
            if pair_ms is not None:
                excess = (self._excess_at(worker, tokens, ahead) for worker in workers)
                return pair_ms + min(excess, default=0.0)
        return min(best_ms, self._quickest_ms(answering, tokens, ahead, sufficient_ms, now))

    def _ways(self, tokens: int) -> tuple[bool, bool]:
        def queue() -> tuple[int, int]:
            return tokens, sum(worker.pending_prefills for worker in self._prefill_workers)

        local, remote = self._rules.choose_ways(bool(self._prefill_workers), queue)
        return local and (self.policy_predicts or not remote), remote

    def _quickest_ms(
        self,
        workers: Sequence[WorkerState],
        tokens: int,
        ahead: int,
        sufficient_ms: float,
        now: float,
    ) -> float:
        """Return the milliseconds to the first token at the quickest worker, or at the first one
        within `sufficient_ms`."""
        rounds = 1 + ahead / max(1, len(workers))
        best_ms = inf
        for worker in workers:
            prompt_ms = worker.predict_prefill_ms(tokens) * rounds
            ms = worker.backlog_ms(now) + prompt_ms + self._excess_at(worker, tokens, ahead)
            best_ms = min(best_ms, ms)
            if best_ms <= sufficient_ms:
                break
        return best_ms

    def _excess_at(self, worker: WorkerState, tokens: int, ahead: int) -> float:
        """Return how much longer than predicted the prompts at a worker may take, with one of
        `tokens` behind `ahead` others."""
        pending_ms = self._excess_ms.get(worker.name, 0.0)
        if ahead or self._excess_ms:
            pending_ms += _excess_ms(worker, tokens)
        return pending_ms


def _excess_ms(worker: WorkerState, tokens: int) -> float:
    steps = -(-tokens // worker.token_budget)
    return worker.latency_model.prefill.excess(steps, tokens)
