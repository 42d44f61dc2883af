"""The contract that everything hangs on: requests go forward as coroutines, answers
come back as calls."""

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
    """Where an answer goes. Synchronous, called on the event loop, never re-entrant.

    Order: `begin` once, `tokens` any number of times, `finish` once. An error is the exception of
    the awaited call, and may come at any place of that order.
    """

    __slots__ = ()

    @abstractmethod
    def begin(self, started: Started) -> None:
        """The engine took the request."""

    @abstractmethod
    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        """The next tokens (`extra`: one entry a token). False = enough: no more calls follow,
        the engine's work is cancelled, and the awaited call returns normally."""

    @abstractmethod
    def finish(self, end: Finish) -> None:
        """The engine ended by itself."""

    @property
    def token_log(self) -> TokenLog | None:
        """Every token id that came here, where this reply keeps them; else None."""
        return None

    def open_fast_path(self, token_log: TokenLog | None = None) -> SendToken | None:
        """Open the fast path for single tokens after the first (`core/fast_path.py`)."""
        del token_log
        return None


SendRequest = Callable[[GenerateRequest, Context, Reply], Awaitable[None]]


class Operator(ABC):
    """A stage of the token pipeline: may change the request, wrap the reply, call call_next again
    or not at all."""

    @abstractmethod
    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        """Pass the request on. Returns when the answer is complete."""


class Engine(ABC):
    """Computes tokens. Constructors do no I/O."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load weights, warm up. Raises `ModelUnavailable` or `ConfigError`."""

    @abstractmethod
    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Answer one request. Being cancelled is the abort: its blocks are free on return."""

    @abstractmethod
    def report_load(self) -> Load:
        """What the engine does now. Cheap."""

    @abstractmethod
    async def stop(self) -> None:
        """Release everything. Requests in flight end with `WorkerFailed`."""

    def has_request(self, reply: Reply) -> bool:
        """Whether the request that answers to `reply` is in work or waits, as far as the engine can
        tell: asked when it has been silent for long. False: nothing will ever come of it."""
        del reply
        return True

    def on_kv_events(self, listener: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call `listener` on the loop, once a step, with what changed. Default: no events."""
        del listener

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        """A dump: events that rebuild the present state from nothing. The next events may say again
        what it says already (a block stored or removed); applying them twice changes nothing."""
        return ()
