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
from dynamo.runtime.instances import Instance
from dynamo.scheduling.admission.places import Held, Places
from dynamo.scheduling.router.attempt import Follower
from dynamo.scheduling.router.placing.fleet import Active, Fleet
from dynamo.scheduling.router.prompt import Prompt

FEW = 4
"""Before so many first tokens were seen, no prefill is predicted."""
ERRORS = 64
"""So many first tokens of requests that waited say how good predictions are."""
EXCEEDED = 3
"""So many of those may have come later than predicted with the margin."""
PACE_EVERY = 8
"""One answer of so many teaches how long a token takes."""
ERROR_AGE_S = 30.0


class Attended(Held, Follower):
    """One request at its worker."""

    __slots__ = ("attendance", "worker")
    attendance: Attendance
    worker: str

    def began(self, started: Started) -> None:
        self.attendance.began(self, started)

    def first_token(self) -> None:
        self.attendance.first_token(self)

    def finished(self, end: Finish) -> None:
        self.tokens = end.completion_tokens

    def left(self, error: BaseException | None) -> None:
        self.attendance.left(self.worker, self, ok=not isinstance(error, DynamoError))


class Attendance:
    """`fleet`: books of the workers, kept here while `keeps` (where the policy does not).
    `on_left` is called whenever a place became free, `on_came` whenever a request came to its
    worker, with what predicted its first token for (None: nothing was)."""

    def __init__(self, clock: Clock, places: Places, fleet: Fleet) -> None:
        self.fleet = fleet
        self.on_left: Callable[[], None] = _nothing
        self.on_came: Callable[[GenerateRequest], float | None] = _nobody
        self._clock = clock
        self._places = places
        self.keeps = False
        self._uncached = 1.0
        self._first_s = 0.0
        self._firsts = 0
        self._left_in_all = 0
        self._errors: deque[tuple[float, float]] = deque(maxlen=ERRORS)

    def follow(self, instance: Instance, request: GenerateRequest) -> Attended:
        """The request goes to that worker."""
        now, worker = self._clock.now(), instance.id
        bound = request.stops.max_tokens
        prompt = len(request.token_ids) // TOKEN_BYTES
        need = prompt + self._places.durations.answer_tokens(bound)
        held = Attended(bound, need, now)
        held.attendance, held.worker = self, worker
        held.predicted_s = self.on_came(request)
        self._places.take(worker, held, now)
        book = self.fleet.get(worker) if self.keeps else None
        if book is not None:
            book.survey(now)
            name = f"{request.request_id}/{id(held)}"
            held.active = Active(name, book, Prompt(prompt, ()), prompt, now)
            book.place(held.active, now)
        return held

    def left(self, worker: str, held: Held, *, ok: bool) -> None:
        """It has its place no more."""
        now = self._clock.now()
        durations = self._places.durations
        if ok:
            durations.observe(held.bound, now - held.began_s)
            if held.tokens and held.first_s is not None:
                durations.answered(held.bound, held.tokens, now - held.first_s)
        if held.active is not None:
            self._left_in_all += 1
            if not self._left_in_all % PACE_EVERY:
                held.active.emitted = held.tokens  # else the book learns no pace from it
            held.active.book.end(held.active, now)
        self._places.leave(worker, held, now)
        self.on_left()

    def prefill_s(self, prompt_tokens: int, others: int = 0, good_s: float = 0.0) -> float:
        """From getting a place to the first token, at the worker that is best for that (or the
        first where it takes `good_s` at most), with so many more requests before it that are on
        their way to some worker."""
        if self._firsts < FEW:
            return 0.0
        desks = self._places.open_desks() or list(self._places.desks.values())
        now, tokens = self._clock.now(), max(1, round(prompt_tokens * self._uncached))
        rounds = 1 + others / max(1, len(desks))
        best = inf
        for desk in desks:
            book = desk.book
            if book is not None:
                took = book.backlog_ms(now) + book.service_ms(tokens) * rounds
                if took < best:
                    best = took
                    if took <= good_s * 1e3:
                        break
        return best * 1e-3 if best < inf else self._first_s

    def margin_s(self) -> float:
        """How much later than predicted first tokens came of late, but for a few."""
        oldest = self._clock.now() - ERROR_AGE_S
        while self._errors and self._errors[0][0] < oldest:
            self._errors.popleft()
        late = sorted(error for _, error in self._errors)
        return max(0.0, late[-EXCEEDED]) if len(late) >= EXCEEDED else 0.0

    def began(self, held: Held, started: Started) -> None:
        """The engine took it, and told what it had of the prompt."""
        if started.prompt_tokens:
            share = 1.0 - started.cached_tokens / started.prompt_tokens
            self._uncached += 0.05 * (share - self._uncached)
        if held.active is not None and started.cached_tokens:
            held.active.book.cached(held.active, started.cached_tokens)

    def first_token(self, held: Held) -> None:
        """Its prompt is computed."""
        now = held.first_s = self._clock.now()
        self._firsts += 1
        if held.active is not None:
            held.active.book.first_token(held.active, now)
        self._first_s += 0.05 * (now - held.began_s - self._first_s)
        if held.predicted_s is not None:
            self.told(held.predicted_s, now)

    def told(self, predicted_s: float, came_s: float) -> None:
        """A first token that was predicted came (or would have, at the earliest)."""
        self._errors.append((self._clock.now(), came_s - predicted_s))


def _nothing() -> None:
    pass


def _nobody(request: GenerateRequest) -> float | None:
    del request
    return None
