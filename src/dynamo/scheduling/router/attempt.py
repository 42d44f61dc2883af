"""One try of one request at one worker, and who follows it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from dynamo.core.clock import Clock
from dynamo.core.reply import Extra, Reply, Shortcut
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.policy import Outcome, Ticket


class Follower:
    """Hears how one try goes, in this order. The tokens after the first pass it by."""

    __slots__ = ()

    def began(self, started: Started) -> None:
        """The engine took it."""

    def first_token(self) -> None:
        """Its prompt is computed."""

    def finished(self, end: Finish) -> None:
        """The engine ended by itself."""

    def left(self, error: BaseException | None) -> None:
        """The worker has it no more, however that came: with that error, or well."""


Follow = Callable[[Instance, GenerateRequest], Follower]
"""Called as the request goes to that worker."""


class Attempt(Reply):
    """Passes everything on, and tells the followers and the policy's `ticket`, on which tokens are
    counted."""

    __slots__ = (
        "_clock",
        "_counts",
        "_followers",
        "_placed_s",
        "_reply",
        "_tokens",
        "cached_tokens",
        "first_s",
        "ticket",
    )

    def __init__(
        self, reply: Reply, followers: Sequence[Follower], ticket: Ticket | None, clock: Clock
    ) -> None:
        self._reply = reply
        self._tokens = reply.tokens
        self._followers = followers
        self._clock = clock
        self._placed_s = clock.now()
        self.ticket = ticket
        kept = reply.kept
        if ticket is not None and kept is not None:
            ticket.listen(kept)
        self._counts = ticket is not None and kept is None
        self.cached_tokens = 0
        self.first_s: float | None = None

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens
        for follower in self._followers:
            follower.began(started)
        self._reply.begin(started)

    def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
        if self.first_s is None:
            self._first()
        ticket = self.ticket
        if self._counts and ticket is not None:
            ticket.emitted += len(ids)
        send = self._tokens  # calling a slot directly is slower in CPython 3.11
        return send(ids, extra)

    @property
    def kept(self) -> array[int] | None:
        return self._reply.kept

    def shortcut(self, kept: array[int] | None = None) -> Shortcut | None:
        return None if self._counts else self._reply.shortcut(kept)

    def _first(self) -> None:
        self.first_s = self._clock.now()
        for follower in self._followers:
            follower.first_token()
        if self.ticket is not None:
            self.ticket.first_token()

    def finish(self, end: Finish) -> None:
        for follower in self._followers:
            follower.finished(end)
        self._reply.finish(end)

    def left(self, error: BaseException | None) -> None:
        """It is over."""
        if self.ticket is not None:
            self.ticket.end()
        for follower in self._followers:
            follower.left(error)

    def outcome(self, prompt_tokens: int, error: str) -> Outcome:
        """What came of it, until now."""
        first_s = None if self.first_s is None else self.first_s - self._placed_s
        return Outcome(
            ttft_s=first_s,
            duration_s=self._clock.now() - self._placed_s,
            cached_tokens=self.cached_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=0 if self.ticket is None else self.ticket.emitted,
            error=error,
        )
