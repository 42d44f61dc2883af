"""Requests in flight: each occupies a slot at its worker and updates the predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission.capacity import ClusterCapacity, Reservation
from dynamo.scheduling.router.attempt import AttemptListener
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.worker_state import PlacedRequest
from dynamo.scheduling.router.worker_states import WorkerStates

MIN_FIRST_TOKENS = 4
"""Prefill times are predicted after this many first tokens."""
MAX_PREDICTION_ERRORS = 64
MARGIN_RANK = 3
"""The margin is the third largest recent error."""
DECODE_SAMPLE_EVERY = 8
"""Every n-th answer updates the time per token of its worker's state."""
MAX_ERROR_AGE_S = 30.0


class TrackedAttempt(Reservation, AttemptListener):
    """The reservation of an attempt at a worker, and the listener that ends it."""

    __slots__ = ("in_flight", "worker")
    in_flight: InFlight
    worker: str

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

    `worker_states` belongs to the policy, or to admission. In the second case
    `updates_worker_states` makes this object update it. `on_slot_released` is called after every
    release.
    """

    def __init__(
        self,
        clock: Clock,
        capacity: ClusterCapacity,
        worker_states: WorkerStates,
        on_slot_released: Callable[[], None],
    ) -> None:
        self.worker_states = worker_states
        self.on_slot_released = on_slot_released
        self.updates_worker_states = False
        self._clock = clock
        self._capacity = capacity
        self._uncached_share = 1.0
        self._mean_ttft_s = 0.0
        self._first_token_count = 0
        self._placed_count = 0
        self._ended_count = 0
        self._prediction_errors: deque[tuple[float, float]] = deque(maxlen=MAX_PREDICTION_ERRORS)

    def track(
        self, instance: Instance, request: GenerateRequest, predicted_first_token_s: float | None
    ) -> TrackedAttempt:
        """Reserve a slot of `instance` for one attempt. The prediction is None for a request that
        did not queue."""
        now, worker = self._clock.now(), instance.id
        max_tokens = request.stops.max_tokens
        prompt_tokens = len(request.token_ids) // TOKEN_BYTES
        kv_tokens = prompt_tokens + self._capacity.durations.predict_output_tokens(max_tokens)
        attempt = TrackedAttempt(max_tokens, kv_tokens, now)
        attempt.in_flight, attempt.worker = self, worker
        attempt.predicted_first_token_s = predicted_first_token_s
        self._capacity.reserve(worker, attempt, now)
        state = self.worker_states.get(worker) if self.updates_worker_states else None
        if state is not None:
            state.refresh(now)
            self._placed_count += 1
            key = f"{request.request_id}/{self._placed_count}"
            prompt = Prompt(prompt_tokens, ())
            attempt.placed_request = PlacedRequest(key, state, prompt, prompt_tokens, now)
            state.place(attempt.placed_request, now)
        return attempt

    def release(self, worker: str, reservation: Reservation, *, ok: bool) -> None:
        """Release the slot. Only requests that ended well (`ok`) are recorded as durations."""
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

    def predict_prefill_s(
        self, prompt_tokens: int, ahead: int = 0, sufficient_s: float = 0.0
    ) -> float:
        """Return the predicted seconds from a slot to the first token, at the best worker or the
        first one within `sufficient_s`. `ahead` requests are on their way to some worker, too."""
        if self._first_token_count < MIN_FIRST_TOKENS:
            return 0.0
        workers = [worker for worker in self._capacity.workers.values() if worker.free_slots]
        workers = workers or list(self._capacity.workers.values())
        now, tokens = self._clock.now(), max(1, round(prompt_tokens * self._uncached_share))
        rounds = 1 + ahead / max(1, len(workers))
        best_ms = inf
        for worker in workers:
            state = worker.state
            if state is not None:
                prefill_ms = state.backlog_ms(now) + state.predict_prefill_ms(tokens) * rounds
                best_ms = min(best_ms, prefill_ms)
                if best_ms <= sufficient_s * 1e3:
                    break
        return best_ms * 1e-3 if best_ms < inf else self._mean_ttft_s

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
        placed = reservation.placed_request
        if placed is not None and started.cached_tokens:
            placed.worker.on_cached_tokens(placed, started.cached_tokens)

    def record_first_token(self, reservation: Reservation) -> None:
        """Record the time of the first token."""
        now = reservation.first_token_s = self._clock.now()
        self._first_token_count += 1
        if reservation.placed_request is not None:
            reservation.placed_request.worker.on_first_token(reservation.placed_request, now)
        self._mean_ttft_s += 0.05 * (now - reservation.started_s - self._mean_ttft_s)
        if reservation.predicted_first_token_s is not None:
            self.record_prediction_error(reservation.predicted_first_token_s, now)

    def record_prediction_error(self, predicted_s: float, actual_s: float) -> None:
        """Record when a predicted first token came, or could have come at the earliest."""
        self._prediction_errors.append((self._clock.now(), actual_s - predicted_s))
