"""The interfaces of the request pipeline.

Requests go forward as awaited calls. Answers come back as synchronous calls of a `Reply`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from dynamo.core.context import Context
from dynamo.core.fast_path import SendToken, TokenLog
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    KvEvent,
    Load,
    Started,
    TokenLogprobs,
)

LogprobsPerToken = Sequence[TokenLogprobs]


class Reply(ABC):
    """Receives one answer. Methods are called on the event loop and never re-entrantly.

    Order: `begin` once, `tokens` any number of times, `finish` once. An error is the exception of
    the awaited call and may end the answer at any point of that order.
    """

    __slots__ = ()

    @abstractmethod
    def begin(self, started: Started) -> None:
        """The engine began the request."""

    @abstractmethod
    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        """Take the next tokens. `logprobs` has one entry for each id.

        False: enough. No more calls follow, and the awaited call ends the work and returns.
        """

    @abstractmethod
    def finish(self, end: Finish) -> None:
        """The engine completed the answer."""

    @property
    def token_log(self) -> TokenLog | None:
        """All token ids of the answer so far, or None if this reply does not keep them."""
        return None

    def open_fast_path(self, token_log: TokenLog | None = None) -> SendToken | None:
        """Open the fast path for single tokens after the first (`core/fast_path.py`)."""
        del token_log
        return None


SendRequest = Callable[[GenerateRequest, Context, Reply], Awaitable[None]]


class Operator(ABC):
    """A stage of the token pipeline, which may change the request and wrap the reply."""

    @abstractmethod
    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        """Handle the request with any number of calls of `call_next`. Returns after the answer."""


class Engine(ABC):
    """Computes tokens. A constructor does no I/O."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load the weights and warm up. Raises `ModelUnavailable` or `ConfigError`."""

    @abstractmethod
    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Answer one request. Cancellation aborts it; its blocks are free on return."""

    @abstractmethod
    def report_load(self) -> Load:
        """Return the present load. This call must be cheap."""

    @abstractmethod
    async def stop(self) -> None:
        """Release all resources. Requests in flight end with `WorkerFailed`."""

    def has_request(self, reply: Reply) -> bool:
        """Whether tokens of the request may still come. True also before the request is queued and
        after it ended.

        The worker asks after a long silence. False means that no further token will come.
        """
        del reply
        return True

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call `listener` on the loop with the events of each step. Default: no events."""
        del listener

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        """Return events that rebuild the present state from nothing.

        Later events may repeat some of them. Applying an event twice changes nothing.
        """
        return ()
