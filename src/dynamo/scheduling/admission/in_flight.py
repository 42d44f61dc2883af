"""Requests in flight: each occupies a slot at its worker and updates the predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.kv_events import worker_name
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission.label_queues import QueuedRequest
from dynamo.scheduling.admission.prompt_workers import PromptWorkers
from dynamo.scheduling.router.attempt import AttemptListener
from dynamo.scheduling.workers.latency_model import FORGETTING_FACTOR
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.slots import ClusterCapacity, Reservation

MIN_FIRST_TOKENS = 4
"""Prefill times are predicted after this many first tokens."""
MAX_PREDICTION_ERRORS = 64
MARGIN_RANK = 3
"""The margin is the third largest recent error."""
DECODE_SAMPLE_EVERY = 8
"""Every n-th answer updates the time per token of its worker's state."""
MAX_ERROR_AGE_S = 30.0


class TrackedAttempt(Reservation, AttemptListener):
    """The reservation of an attempt at a worker, and the listener that ends it. `excess_ms`: how
    much longer than predicted the prompt may take at `prompt_worker`; 0 from its first token on."""

    __slots__ = ("excess_ms", "in_flight", "prompt_worker", "worker")
    in_flight: InFlight
    worker: str
    prompt_worker: str
    excess_ms: float

    def on_started(self, started: Started) -> None:
        self.in_flight.record_start(self, started)

    def on_first_token(self) -> None:
        self.in_flight.record_first_token(self)

    def on_finished(self, end: Finish) -> None:
        self.output_tokens = end.completion_tokens

    def on_ended(self, error: BaseException | None) -> None:
        self.in_flight.release(self.worker, self, ok=not isinstance(error, DynamoError))


class InFlight:
    """Count requests in flight and learn from their times.

    Worker states that belong to `prompt_workers` are updated here, those of a policy are not.
    `on_slot_released` is called after every release.
    """

    def __init__(
        self,
        clock: Clock,
        capacity: ClusterCapacity,
        prompt_workers: PromptWorkers,
        on_slot_released: Callable[[], None],
    ) -> None:
        self.prompt_workers = prompt_workers
        self.on_slot_released = on_slot_released
        self._clock = clock
        self._capacity = capacity
        self._uncached_share = 1.0
        self._most_cached_tokens = 0.0
        self._mean_ttft_s = 0.0
        self._first_token_count = 0
        self._placed_count = 0
        self._ended_count = 0
        self._prediction_errors: deque[tuple[float, float]] = deque(maxlen=MAX_PREDICTION_ERRORS)

    def track(
        self, instance: Instance, request: GenerateRequest, predicted_first_token_s: float | None
    ) -> TrackedAttempt:
        """Reserve a slot of the request's rank at `instance` for one attempt. The prediction is
        None for a request that did not queue."""
        now, worker = self._clock.now(), instance.id
        if request.rank is not None:
            worker = worker_name(worker, request.rank)
        max_tokens = request.stops.max_tokens
        prompt_tokens = len(request.token_ids) // TOKEN_BYTES
        kv_tokens = prompt_tokens + self._capacity.durations.predict_output_tokens(max_tokens)
        attempt = TrackedAttempt(max_tokens, kv_tokens, now)
        attempt.in_flight, attempt.worker = self, worker
        attempt.prompt_worker = request.prefill or worker
        attempt.excess_ms = 0.0
        if self.prompt_workers.states.workers:
            tokens = self._uncached_tokens(prompt_tokens)
            attempt.excess_ms = self.prompt_workers.add_excess(attempt.prompt_worker, tokens)
        attempt.predicted_first_token_s = predicted_first_token_s
        self._capacity.reserve(worker, attempt, now)
        states = self.prompt_workers.states if self.prompt_workers.owns_states else None
        state = states.get(worker) if states is not None else None
        if state is not None:
            self.prompt_workers.states.refresh_next(now)
            self._placed_count += 1
            key = f"{request.request_id}/{self._placed_count}"
            prompt = Prompt(prompt_tokens, ())
            prefill_state = self.prompt_workers.states.get(request.prefill) or state
            placed = PlacedRequest(key, prefill_state, prompt, prompt_tokens, now)
            prefill_state.place(placed, now)
            if prefill_state is not state:
                prefill_state.expect_answer(placed, state)
            attempt.placed_request = placed
        return attempt

    def release(self, worker: str, reservation: TrackedAttempt, *, ok: bool) -> None:
        """Release the slot. Only requests that ended well (`ok`) are recorded as durations."""
        if reservation.excess_ms:
            self._remove_excess(reservation)
        now, max_tokens = self._clock.now(), reservation.max_tokens
        durations, output_tokens = self._capacity.durations, reservation.output_tokens
        if ok:
            durations.observe(max_tokens, now - reservation.started_s)
            if output_tokens and reservation.first_token_s is not None:
                durations.observe_output(max_tokens, output_tokens, now - reservation.first_token_s)
        placed = reservation.placed_request
        if placed is not None:
            self._ended_count += 1
            if not self._ended_count % DECODE_SAMPLE_EVERY:
                placed.emitted = output_tokens  # only then its time per token is learnt
            placed.worker.remove(placed, now)
        self._capacity.release(worker, reservation, now)
        self.on_slot_released()

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
        workers = [worker for worker in self._capacity.workers.values() if worker.free_slots]
        workers = workers or list(self._capacity.workers.values())
        states = [worker.state for worker in workers if worker.state is not None]
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

    def record_start(self, reservation: Reservation, started: Started) -> None:
        """Record how much of the prompt the engine had cached."""
        if started.prompt_tokens:
            share = 1.0 - started.cached_tokens / started.prompt_tokens
            self._uncached_share += 0.05 * (share - self._uncached_share)
            most = self._most_cached_tokens * FORGETTING_FACTOR
            self._most_cached_tokens = max(most, started.cached_tokens)
        placed = reservation.placed_request
        if placed is not None and started.cached_tokens:
            placed.worker.on_cached_tokens(placed, started.cached_tokens)

    def record_first_token(self, reservation: TrackedAttempt) -> None:
        """Record the time of the first token."""
        if reservation.excess_ms:
            self._remove_excess(reservation)
        now = reservation.first_token_s = self._clock.now()
        self._first_token_count += 1
        if (placed := reservation.placed_request) is not None:
            worker = placed.worker
            worker.on_first_token(placed, now)
            worker.hand_over(placed)
        self._mean_ttft_s += 0.05 * (now - reservation.started_s - self._mean_ttft_s)
        if reservation.predicted_first_token_s is not None:
            self.record_prediction_error(reservation.predicted_first_token_s, now)

    def _remove_excess(self, attempt: TrackedAttempt) -> None:
        self.prompt_workers.remove_excess(attempt.prompt_worker, attempt.excess_ms)
        attempt.excess_ms = 0.0

    def record_prediction_error(self, predicted_s: float, actual_s: float) -> None:
        """Record when a predicted first token came, or could have come at the earliest."""
        self._prediction_errors.append((self._clock.now(), actual_s - predicted_s))
