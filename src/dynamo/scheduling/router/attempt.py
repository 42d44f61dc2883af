"""An attempt of a request at one worker, and the listeners that follow it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.fast_path import SendToken
from dynamo.core.kv_events import worker_name
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import TextPart
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.policy import Outcome
from dynamo.scheduling.workers.data_parallel import NO_RANKS, data_parallel_ranks
from dynamo.scheduling.workers.placed_request import Placement


class AttemptListener:
    """Receives the events of one attempt in this order. Tokens after the first are not reported."""

    __slots__ = ()

    def on_started(self, started: Started) -> None:
        """Called when the engine has accepted the request."""

    def on_first_token(self) -> None:
        """Called when the prompt is computed."""

    def on_finished(self, end: Finish) -> None:
        """Called when the engine has finished the answer."""

    def on_ended(self, error: BaseException | None) -> None:
        """Called once, last, when the request has left the worker; `error` is None on success."""


class CallCount(AttemptListener):
    """Counts an attempt as a `call` of a worker, until its end or its first token."""

    __slots__ = ("_call", "_until_first_token")

    def __init__(
        self, call: AbstractContextManager[None], *, until_first_token: bool = False
    ) -> None:
        self._call: AbstractContextManager[None] | None = call
        self._until_first_token = until_first_token
        call.__enter__()

    def on_first_token(self) -> None:
        if self._until_first_token:
            self._end()

    def on_ended(self, error: BaseException | None) -> None:
        del error
        self._end()

    def _end(self) -> None:
        if self._call is not None:
            self._call.__exit__(None, None, None)
            self._call = None


class RankBalancer:
    """Chooses the data-parallel rank where a policy has chosen only the instance: the one with the
    fewest requests of this process in flight. Ties go to the next one."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._choices: Counter[str] = Counter()

    def choose(self, instance: Instance, excluded: AbstractSet[str]) -> int | None:
        """Return a rank whose name is not `excluded`, or any if all are; None without ranks."""
        ranks = data_parallel_ranks(instance)
        if ranks is NO_RANKS:
            return None

        self._choices[instance.id] += 1
        first = self._choices[instance.id] % len(ranks)

        def load(rank: int | None) -> tuple[bool, int]:
            name = worker_name(instance.id, rank)
            return name in excluded, self._in_flight[name]

        return min((*ranks[first:], *ranks[:first]), key=load)

    @contextmanager
    def track_call(self, worker: str) -> Iterator[None]:
        """Count the body of the `with` statement as a request of the rank `worker`."""
        self._in_flight[worker] += 1
        try:
            yield
        finally:
            self._in_flight[worker] -= 1
            if not self._in_flight[worker]:
                del self._in_flight[worker]


ListenerFactory = Callable[[Instance, GenerateRequest], AttemptListener]
"""Return the listener of one attempt. Called just before the request is sent to that instance; one
listener may follow many attempts."""


class Attempt(Reply):
    """Forward one attempt's reply, and notify the listeners and the policy's `placement`. Tokens
    are counted in the reply's token log; without a log, each call counts them on `placement`."""

    __slots__ = (
        "_clock",
        "_counts_tokens",
        "_listeners",
        "_placed_s",
        "_prefill",
        "_reply",
        "_tokens",
        "cached_tokens",
        "ended_by_token",
        "first_token_s",
        "placement",
    )

    def __init__(
        self,
        reply: Reply,
        listeners: Sequence[AttemptListener],
        placement: Placement | None,
        clock: Clock,
        prefill: str = "",
    ) -> None:
        """`prefill`: the worker that computes the prompt, if another one."""
        self._reply = reply
        self._prefill = prefill
        self._tokens = reply.tokens
        self._listeners = listeners
        self._clock = clock
        self._placed_s = clock.now()
        self.placement = placement
        token_log = reply.token_log
        if placement is not None and token_log is not None:
            placement.attach_token_log(token_log)
        self._counts_tokens = placement is not None and token_log is None
        self.cached_tokens = 0
        self.ended_by_token = False
        self.first_token_s: float | None = None

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens
        if self._prefill:
            started = replace(started, prefill=self._prefill)
        for listener in self._listeners:
            listener.on_started(started)
        self._reply.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        if self.first_token_s is None:
            self._on_first_token()
        placement = self.placement
        if self._counts_tokens and placement is not None:
            placement.emitted += len(ids)
        send = self._tokens  # calling a slot directly is slower in CPython 3.11
        return send(ids, logprobs)

    def text(self, part: TextPart) -> bool:
        if self.first_token_s is None:
            self._on_first_token()
        if self._counts_tokens and self.placement is not None:
            self.placement.emitted += 1
        return self._reply.text(part)

    @property
    def token_log(self) -> array[int] | None:
        return self._reply.token_log

    def open_fast_path(self, token_log: array[int] | None = None) -> SendToken | None:
        return None if self._counts_tokens else self._reply.open_fast_path(token_log)

    def _on_first_token(self) -> None:
        self.first_token_s = self._clock.now()
        for listener in self._listeners:
            listener.on_first_token()
        if self.placement is not None:
            self.placement.on_first_token()

    def finish(self, end: Finish) -> None:
        self.ended_by_token = end.stop_token is not None
        if end.cached_tokens is not None:
            self.cached_tokens = end.cached_tokens
        for listener in self._listeners:
            listener.on_finished(end)
        self._reply.finish(end)

    def close(self, error: BaseException | None) -> None:
        """End the attempt with `error`, or None on success."""
        if self.placement is not None:
            self.placement.end()
        for listener in self._listeners:
            listener.on_ended(error)

    def outcome(self, prompt_tokens: int, error: str) -> Outcome:
        """Return the result so far. `error` is an error code, "" on success. The token that ended
        the answer counts as an output token."""
        emitted = 0 if self.placement is None else self.placement.emitted + self.ended_by_token
        first_s = None if self.first_token_s is None else self.first_token_s - self._placed_s
        return Outcome(
            ttft_s=first_s,
            duration_s=self._clock.now() - self._placed_s,
            cached_tokens=self.cached_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=emitted,
            error=error,
        )
