"""Sees every request come to its worker, say its first token, and leave: what places and
predictions are learnt from."""

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
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerStates

MIN_FIRST_TOKENS = 4
"""Before so many first tokens were seen, no prefill is predicted."""
MAX_PREDICTION_ERRORS = 64
"""So many first tokens of requests that waited say how good predictions are."""
MARGIN_EXCEEDANCES = 3
"""So many of those may have come later than predicted with the margin."""
DECODE_SAMPLE_EVERY = 8
"""One answer of so many teaches how long a token takes."""
MAX_ERROR_AGE_S = 30.0


class TrackedAttempt(Reservation, AttemptListener):
    """One request at its worker."""

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
    """`fleet`: books of the workers, kept here while `keeps` (where the policy does not).
    `on_left` is called whenever a place became free, `on_came` whenever a request came to its
    worker, with what predicted its first token for (None: nothing was)."""

    def __init__(
        self,
        clock: Clock,
        places: ClusterCapacity,
        fleet: WorkerStates,
        on_slot_released: Callable[[], None],
    ) -> None:
        self.worker_states = fleet
        self.on_slot_released = on_slot_released
        self._clock = clock
        self._capacity = places
        self.updates_worker_states = False
        self._uncached_share = 1.0
        self._mean_ttft_s = 0.0
        self._first_token_count = 0
        self._ended_count = 0
        self._placed_count = 0
        self._prediction_errors: deque[tuple[float, float]] = deque(maxlen=MAX_PREDICTION_ERRORS)

    def track(
        self, instance: Instance, request: GenerateRequest, predicted_first_token_s: float | None
    ) -> TrackedAttempt:
        """The request goes to that worker."""
        now, worker = self._clock.now(), instance.id
        bound = request.stops.max_tokens
        prompt = len(request.token_ids) // TOKEN_BYTES
        need = prompt + self._capacity.durations.predict_output_tokens(bound)
        held = TrackedAttempt(bound, need, now)
        held.in_flight, held.worker = self, worker
        held.predicted_first_token_s = predicted_first_token_s
        self._capacity.reserve(worker, held, now)
        book = self.worker_states.get(worker) if self.updates_worker_states else None
        if book is not None:
            book.refresh(now)
            self._placed_count += 1
            key = f"{request.request_id}/{self._placed_count}"
            held.placed_request = PlacedRequest(key, book, Prompt(prompt, ()), prompt, now)
            book.place(held.placed_request, now)
        return held

    def release(self, worker: str, held: Reservation, *, ok: bool) -> None:
        """It has its place no more."""
        now = self._clock.now()
        durations = self._capacity.durations
        if ok:
            durations.observe(held.max_tokens, now - held.started_s)
            if held.output_tokens and held.first_token_s is not None:
                durations.observe_output(
                    held.max_tokens, held.output_tokens, now - held.first_token_s
                )
        if held.placed_request is not None:
            self._ended_count += 1
            if not self._ended_count % DECODE_SAMPLE_EVERY:
                held.placed_request.emitted = (
                    held.output_tokens
                )  # else the book learns no pace from it
            held.placed_request.worker.remove(held.placed_request, now)
        self._capacity.release(worker, held, now)
        self.on_slot_released()

    def predict_prefill_s(self, prompt_tokens: int, others: int = 0, good_s: float = 0.0) -> float:
        """From getting a place to the first token, at the worker that is best for that (or the
        first where it takes `good_s` at most), with so many more requests before it that are on
        their way to some worker."""
        if self._first_token_count < MIN_FIRST_TOKENS:
            return 0.0
        desks = self._capacity.list_workers_with_free_slots() or list(
            self._capacity.workers.values()
        )
        now, tokens = self._clock.now(), max(1, round(prompt_tokens * self._uncached_share))
        rounds = 1 + others / max(1, len(desks))
        best = inf
        for desk in desks:
            book = desk.state
            if book is not None:
                took = book.backlog_ms(now) + book.predict_prefill_ms(tokens) * rounds
                if took < best:
                    best = took
                    if took <= good_s * 1e3:
                        break
        return best * 1e-3 if best < inf else self._mean_ttft_s

    def compute_margin_s(self) -> float:
        """How much later than predicted first tokens came of late, but for a few."""
        oldest = self._clock.now() - MAX_ERROR_AGE_S
        while self._prediction_errors and self._prediction_errors[0][0] < oldest:
            self._prediction_errors.popleft()
        late = sorted(error for _, error in self._prediction_errors)
        return max(0.0, late[-MARGIN_EXCEEDANCES]) if len(late) >= MARGIN_EXCEEDANCES else 0.0

    def record_start(self, held: Reservation, started: Started) -> None:
        """The engine took it, and told what it had of the prompt."""
        if started.prompt_tokens:
            share = 1.0 - started.cached_tokens / started.prompt_tokens
            self._uncached_share += 0.05 * (share - self._uncached_share)
        if held.placed_request is not None and started.cached_tokens:
            held.placed_request.worker.on_cached_tokens(held.placed_request, started.cached_tokens)

    def record_first_token(self, held: Reservation) -> None:
        """Its prompt is computed."""
        now = held.first_token_s = self._clock.now()
        self._first_token_count += 1
        if held.placed_request is not None:
            held.placed_request.worker.on_first_token(held.placed_request, now)
        self._mean_ttft_s += 0.05 * (now - held.started_s - self._mean_ttft_s)
        if held.predicted_first_token_s is not None:
            self.record_prediction_error(held.predicted_first_token_s, now)

    def record_prediction_error(self, predicted_s: float, came_s: float) -> None:
        """A first token that was predicted came (or would have, at the earliest)."""
        self._prediction_errors.append((self._clock.now(), came_s - predicted_s))
