"""A reply that its ticket follows."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.core.clock import Clock
from dynamo.core.reply import Extra, Reply
from dynamo.core.values import Finish, Started
from dynamo.scheduling.router.policy import Outcome, Ticket


class TrackedReply(Reply):
    """Passes everything on; counts tokens on `ticket` and tells it of the first."""

    __slots__ = ("_clock", "_reply", "_started", "_tokens", "cached_tokens", "first_s", "ticket")

    def __init__(self, reply: Reply, ticket: Ticket, clock: Clock) -> None:
        self._reply = reply
        self._tokens = reply.tokens
        self._clock = clock
        self._started = clock.now()
        self.ticket = ticket
        self.cached_tokens = 0
        self.first_s: float | None = None

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens
        self._reply.begin(started)

    def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
        ticket = self.ticket
        if not ticket.emitted:
            self.first_s = self._clock.now()
            ticket.first_token()
        ticket.emitted += len(ids)
        send = self._tokens  # calling a slot directly is slower in CPython 3.11
        return send(ids, extra)

    def finish(self, end: Finish) -> None:
        self._reply.finish(end)

    def outcome(self, prompt_tokens: int, error: str) -> Outcome:
        """What came of it, until now."""
        first_s = None if self.first_s is None else self.first_s - self._started
        return Outcome(
            ttft_s=first_s,
            duration_s=self._clock.now() - self._started,
            cached_tokens=self.cached_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=self.ticket.emitted,
            error=error,
        )
