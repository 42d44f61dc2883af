"""The interfaces of the request pipeline.

Requests go forward as awaited calls. Answers come back as synchronous calls of a `Reply`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, ProtocolError, Unsupported
from dynamo.core.fast_path import SendToken, TokenLog
from dynamo.core.text import TextPart
from dynamo.core.timing.learner import TimingLearner
from dynamo.core.values import (
    EngineInfo,
    EngineTotals,
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
        """The engine began the request.

        An engine that learns `Started.cached_tokens` with the first token calls this just before
        that token. With a `Context.attempt` above 0 it calls this as soon as it has the request and
        before it computes it, if need be without `cached_tokens`: if the request kills the engine,
        migration then knows which requests it had begun.
        """

    @abstractmethod
    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        """Take the next tokens. `logprobs` has one entry for each id.

        False: enough. No more calls follow, and the awaited call ends the work and returns.
        """

    def text(self, part: TextPart) -> bool:
        """Take a part of the answer to a request with `GenerateRequest.text`, which has no tokens.
        Returns as `tokens`. Default: raises `ProtocolError`."""
        raise ProtocolError(f"a {type(part).__name__} came where tokens were expected")

    def restart(self) -> bool:
        """Forget the text so far, because the answer begins again at another worker. False: the
        reader has a part of it."""
        return False

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


KvEventListener = Callable[[Sequence[KvEvent]], None]


class EngineRank(ABC):
    """A data-parallel rank of an engine: its load, and the KV blocks that it caches for prompts.
    Blocks have `EngineInfo.block_tokens` and are named as `core/hashing.py` does, whatever the size
    and the names of the engine's own blocks.

    `timing_learner` learns the time of steps where the engine tells them; None elsewhere.
    `on_step` gets the requests and seconds of each of these steps."""

    timing_learner: TimingLearner | None = None
    on_step: Callable[[int, float], None] | None = None

    @abstractmethod
    def report_load(self) -> Load:
        """Return the present load. This call must be cheap."""

    def on_kv_events(self, listener: KvEventListener) -> None:
        """Call `listener` on the loop with the events of each step. Default: no events."""
        del listener

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        """Return events that rebuild the present state from nothing.

        Later events may repeat some of them. Applying an event twice changes nothing.
        """
        return ()

    @property
    def kv_problem(self) -> str:
        """Why routers have to predict the blocks of this rank, or "" while its events tell them."""
        return ""

    @property
    def kv_counts(self) -> Mapping[tuple[str, str], int]:
        """Counts of KV events that are read from a foreign engine, by subject ("blocks", "checks",
        "messages") and kind."""
        return {}


class KvConnector(ABC):
    """The part of a foreign engine that moves the KV of prompts between engines of the same `kind`.

    `lease_s`: the engine that computed a prompt keeps its KV for this time. `failures` counts loads
    that failed after `GenerateRequest.kv` was given to this engine, which then computes the prompt.
    """

    kind: str
    lease_s: float
    failures: Counter[str]

    @abstractmethod
    async def prefill(self, request: GenerateRequest, context: Context) -> bytes:
        """Compute a prompt for another engine, and return its `GenerateRequest.kv`. Raises as
        `Engine.generate`."""

    @abstractmethod
    def release(self, kv: bytes) -> None:
        """Let the other engine free the KV that it keeps: no request will load it here."""


class LoraAdapters(ABC):
    """The LoRA adapters of an engine. `paths` has the path of each loaded one by its id.

    `fetch` returns the folder of a path: of a name on the hub or a URL, the model store's.
    """

    paths: Mapping[str, str]
    fetch: Callable[[str], Awaitable[str]] | None = None

    @property
    def replaced(self) -> Collection[str]:
        """Ids whose names have other weights now. Requests that were sent before are answered."""
        return ()

    def has(self, adapter: str) -> bool:
        """Whether requests that name this id are answered."""
        return adapter in self.paths or adapter in self.replaced

    @abstractmethod
    async def start(self) -> None:
        """Load the adapters of the engine's settings. Raises `ConfigError`."""

    @abstractmethod
    async def load(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load the adapter at `path`, which requests may name when this returns. Raises
        `InvalidRequest`, also for a name that has other content, unless `replace` is set."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Forget an adapter. Requests in flight continue. Raises `NotFound`."""


class Engine(EngineRank):
    """Computes tokens. A constructor does no I/O.

    An engine may be its only rank. Others report the load of their rank, or the sum of those of
    several `ranks` with `Load.ranks`, and no events of their own.
    """

    failure: DynamoError | None = None
    """Why every request fails, or None while the engine serves."""

    kv_connector: KvConnector | None = None
    """Moves KV between this engine and others, if it was started with one."""

    adapters: LoraAdapters | None = None
    """The LoRA adapters, if the engine was started for them."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load the weights and warm up. Raises `ModelUnavailable` or `ConfigError`.

        The loop must stay responsive meanwhile: what blocks is done in a thread.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Answer one request. Raises `WorkerFailed` after a failure of the engine. Cancellation
        aborts the request and returns at once; its blocks may be free one step later."""

    @abstractmethod
    async def stop(self) -> None:
        """Release all resources. Requests in flight end with `WorkerFailed`."""

    async def prove_progress(self, canary: GenerateRequest, context: Context, reply: Reply) -> None:
        """Prove that the idle engine works: it answers `canary`, unless it has another proof.
        Raises as `generate`."""
        await self.generate(canary, context, reply)

    def has_request(self, reply: Reply) -> bool:
        """Whether tokens of the request may still come. True also before the request is queued and
        after it ended.

        The worker asks after a long silence. False means that no further token will come.
        """
        del reply
        return True

    @property
    def ranks(self) -> Sequence[EngineRank]:
        """The data-parallel ranks: `EngineInfo.data_parallel` many."""
        return (self,)

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the loop when the engine fails for good. Default: it never does."""
        del listener

    def sleep_refusal(self, level: int) -> str:
        """Say why the engine cannot sleep at this level; "" if it can."""
        del level
        return "it cannot give memory back while it runs"

    async def sleep(self, level: int) -> None:
        """Give memory back: that of KV at level 1, that of weights as well at level 2. Weights stay
        in host memory at level 1. Requests that are left fail. The caller has asked
        `sleep_refusal`. After an error the engine must be stopped."""
        raise Unsupported(f"this engine cannot sleep: {self.sleep_refusal(level)}")

    async def wake_up(self) -> None:
        """Take the memory again, and load weights that it lacks. Returns when the engine answers as
        before. After an error the engine must be stopped."""

    async def clear_blocks(self) -> int:
        """Empty the prefix caches of all ranks and return how many blocks these held. Events say so
        before the call returns."""
        return 0

    def totals(self) -> EngineTotals | None:
        """Return the totals for metrics, or None if the engine counts nothing."""
        return None
