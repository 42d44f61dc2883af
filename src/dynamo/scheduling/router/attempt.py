"""One try of one request at one worker, and who follows it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from dynamo.core.clock import Clock
from dynamo.core.fast_path import SendToken
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.placement_handle import Placement
from dynamo.scheduling.router.policy import Outcome


class AttemptListener:
    """Hears how one try goes, in this order. The tokens after the first pass it by."""

    __slots__ = ()

    def on_started(self, started: Started) -> None:
        """The engine took it."""

    def on_first_token(self) -> None:
        """Its prompt is computed."""

    def on_finished(self, end: Finish) -> None:
        """The engine ended by itself."""

    def on_ended(self, error: BaseException | None) -> None:
        """The worker has it no more, however that came: with that error, or well."""


ListenerFactory = Callable[[Instance, GenerateRequest], AttemptListener]
"""Return the listener of one attempt. Called just before the request is sent to that instance; one
listener may follow many attempts."""


class Attempt(Reply):
    """Passes everything on, and tells the followers and the policy's `ticket`, on which tokens are
    counted."""

    __slots__ = (
        "_clock",
        "_counts_tokens",
        "_listeners",
        "_placed_s",
        "_reply",
        "_tokens",
        "cached_tokens",
        "first_token_s",
        "placement",
    )

    def __init__(
        self,
        reply: Reply,
        followers: Sequence[AttemptListener],
        ticket: Placement | None,
        clock: Clock,
    ) -> None:
        self._reply = reply
        self._tokens = reply.tokens
        self._listeners = followers
        self._clock = clock
        self._placed_s = clock.now()
        self.placement = ticket
        kept = reply.token_log
        if ticket is not None and kept is not None:
            ticket.attach_token_log(kept)
        self._counts_tokens = ticket is not None and kept is None
        self.cached_tokens = 0
        self.first_token_s: float | None = None

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens
        for follower in self._listeners:
            follower.on_started(started)
        self._reply.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        if self.first_token_s is None:
            self._on_first_token()
        ticket = self.placement
        if self._counts_tokens and ticket is not None:
            ticket.emitted += len(ids)
        send = self._tokens  # calling a slot directly is slower in CPython 3.11
        return send(ids, logprobs)

    @property
    def token_log(self) -> array[int] | None:
        return self._reply.token_log

    def open_fast_path(self, token_log: array[int] | None = None) -> SendToken | None:
        return None if self._counts_tokens else self._reply.open_fast_path(token_log)

    def _on_first_token(self) -> None:
        self.first_token_s = self._clock.now()
        for follower in self._listeners:
            follower.on_first_token()
        if self.placement is not None:
            self.placement.on_first_token()

    def finish(self, end: Finish) -> None:
        for follower in self._listeners:
            follower.on_finished(end)
        self._reply.finish(end)

    def close(self, error: BaseException | None) -> None:
        """It is over."""
        if self.placement is not None:
            self.placement.end()
        for follower in self._listeners:
            follower.on_ended(error)

    def outcome(self, prompt_tokens: int, error: str) -> Outcome:
        """What came of it, until now."""
        first_s = None if self.first_token_s is None else self.first_token_s - self._placed_s
        return Outcome(
            ttft_s=first_s,
            duration_s=self._clock.now() - self._placed_s,
            cached_tokens=self.cached_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=0 if self.placement is None else self.placement.emitted,
            error=error,
        )
