"""The times of first tokens: what admission learns and predicts, and who computes the prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from dynamo.core.clock import Clock
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.core.values import Started
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.admission.capacity import ClusterCapacity
from dynamo.scheduling.admission.label_queues import QueuedRequest
from dynamo.scheduling.router.costs.pair_price import PairRules
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.workers.latency_model import FORGETTING_FACTOR
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


MIN_FIRST_TOKENS = 4
"""Prefill times are predicted after this many first tokens."""
MAX_PREDICTION_ERRORS = 64
MARGIN_RANK = 3
"""The margin is the third largest recent error."""
MAX_ERROR_AGE_S = 30.0


class FirstTokens:
    """Learn from the first tokens of the requests in `ledger`, and predict the next ones."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        capacity: ClusterCapacity,
        prompt_workers: PromptWorkers,
    ) -> None:
        self.prompt_workers = prompt_workers
        self._ledger = ledger
        self._clock = clock
        self._capacity = capacity
        self._uncached_share = 1.0
        self._most_cached_tokens = 0.0
        self._mean_ttft_s = 0.0
        self._first_token_count = 0
        self._prediction_errors: deque[tuple[float, float]] = deque(maxlen=MAX_PREDICTION_ERRORS)
        ledger.on_started.append(self._on_started)
        ledger.on_first_token.append(self._on_first_token)

    def add_excess(self, placed: PlacedRequest) -> None:
        """Count how much longer than predicted a prompt may take, until its first token or end."""
        tokens = self._uncached_tokens(placed.prompt_tokens)
        self.prompt_workers.add_excess(placed, tokens)

    def count_idle(self, prompt_tokens: int) -> int:
        """Return how many workers would compute a prompt at once."""
        remote = self.prompt_workers.remote(self._uncached_tokens(prompt_tokens))
        if remote:
            return sum(not worker.pending_prefills for worker in remote)
        return self._capacity.count_idle()

    def would_start(self, queued: QueuedRequest, wait_s: float) -> bool:
        """Whether a worker would compute the prompt at once after `wait_s`. Then nothing is gained
        by a rejection."""
        prompt_tokens = len(queued.request.token_ids) // TOKEN_BYTES
        if self.prompt_workers.remote(self._uncached_tokens(prompt_tokens)):
            return not wait_s and self.count_idle(prompt_tokens) > 0
        return self._capacity.count_idle(queued.excluded_workers) > 0

    def predict_prefill_s(
        self, prompt_tokens: int, ahead: int = 0, sufficient_s: float = 0.0
    ) -> float:
        """Return the predicted seconds from a slot to the first token, at the best worker or the
        first one within `sufficient_s`. `ahead` requests are on their way to some worker, too."""
        if self._first_token_count < MIN_FIRST_TOKENS:
            return 0.0
        states: Sequence[WorkerState] = ()
        if self._ledger.models_prompts:
            every = self._capacity.workers
            states = [worker for worker in every if worker.slots.free_slots] or every
        tokens, now = self._uncached_tokens(prompt_tokens), self._clock.now()
        ms = self.prompt_workers.predict_ms(states, tokens, ahead, sufficient_s * 1e3, now)
        return ms * 1e-3 if ms < inf else self._mean_ttft_s

    def _uncached_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of a prompt that are computed, by the recent share of cached ones. A
        long prompt has no more cached ones than the prompts before it."""
        cached_tokens = min(prompt_tokens * (1.0 - self._uncached_share), self._most_cached_tokens)
        return max(1, round(prompt_tokens - cached_tokens))

    def compute_margin_s(self) -> float:
        """Return the third largest of the recent delays of first tokens beyond their predictions,
        or 0."""
        oldest = self._clock.now() - MAX_ERROR_AGE_S
        while self._prediction_errors and self._prediction_errors[0][0] < oldest:
            self._prediction_errors.popleft()
        errors = sorted(error for _, error in self._prediction_errors)
        return max(0.0, errors[-MARGIN_RANK]) if len(errors) >= MARGIN_RANK else 0.0

    def _on_started(self, placed: PlacedRequest, started: Started) -> None:
        """Note how much of the prompt the engine had cached."""
        if started.prompt_tokens:
            share = 1.0 - started.cached_tokens / started.prompt_tokens
            self._uncached_share += 0.05 * (share - self._uncached_share)
            most = self._most_cached_tokens * FORGETTING_FACTOR
            self._most_cached_tokens = max(most, started.cached_tokens)
        known = self.prompt_workers.policy_predicts or placed.new_tokens < placed.prompt_tokens
        if started.cached_tokens and not known:
            placed.worker.on_cached_tokens(placed, started.cached_tokens)

    def _on_first_token(self, placed: PlacedRequest) -> None:
        if placed.peer:
            return
        if placed.excess_ms:
            self.prompt_workers.remove_excess(placed)
        now = placed.first_token_s = self._clock.now()
        self._first_token_count += 1
        self._mean_ttft_s += 0.05 * (now - placed.placed_s - self._mean_ttft_s)
        if placed.predicted_first_token_s is not None:
            self.record_prediction_error(placed.predicted_first_token_s, now)

    def record_prediction_error(self, predicted_s: float, actual_s: float) -> None:
        """Record when a predicted first token came, or could have come at the earliest."""
        self._prediction_errors.append((self._clock.now(), actual_s - predicted_s))
