"""`MultiprocessEngine`: what adapters of engines with processes of their own share."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InvalidRequest, ModelUnavailable, WorkerFailed
from dynamo.core.reply import Engine, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo, EngineTotals, GenerateRequest, Load, sum_loads
from dynamo.inference.engines.answer import ForeignAnswer, check_prompt
from dynamo.inference.engines.compile_cache import open_compile_cache
from dynamo.inference.engines.event_reader import KvEventEndpoint
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.inference.engines.rank import ViewedRank
from dynamo.runtime.calls.interruptible import Interruptible

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs

log = logging.getLogger(__name__)

NEUTRAL_SAMPLING: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling from all tokens as the model weighs them, which these engines do by default."""


class Computation(NamedTuple):
    """A request with its prompt `ids` and its context, on the rank with this index. `number`: its
    own in the engine."""

    request: GenerateRequest
    context: Context
    ids: list[int]
    rank: int
    number: int


class MultiprocessEngine(Engine):
    """A foreign engine in this process, with its workers in others. A subclass starts it as `_llm`,
    gives it single requests and reads its outputs.

    `title` is its name in messages. `refusals` are its errors for a wrong request.
    `steps_per_output`: 0 for an engine that reports its steps.
    """

    title: str
    rank_type: type[ViewedRank] = ViewedRank
    refusals: tuple[type[Exception], ...] = (ValueError,)
    steps_per_output = 1

    def __init__(self, inputs: EngineInputs) -> None:
        self.inputs = inputs
        self.tasks = BackgroundTasks()
        self.processes = EngineProcesses()
        self._llm: Any = None
        self._ranks: tuple[ViewedRank, ...] = ()
        self._info: EngineInfo | None = None
        self._failure_listeners: list[Callable[[], None]] = []
        self._calls: dict[Interruptible, None] = {}
        self._numbers = count()
        self._totals = EngineTotals()
        self.failure = WorkerFailed("the engine has not started")

    @abstractmethod
    async def open_engine(self) -> EngineInfo:
        """Start the engine and set its ranks. Raises `ModelUnavailable` or `ConfigError`."""

    @abstractmethod
    def open_stream(self, computation: Computation) -> Any:
        """Give a request to the engine, and return the iterator of its outputs."""

    @abstractmethod
    def forward(self, output: Any, answer: ForeignAnswer) -> bool:
        """Pass an output on. False: the answer is complete, or the reply has enough. Raises the
        error by which the engine ended the request."""

    @abstractmethod
    async def close_stream(self, stream: Any, *, ended: bool) -> None:
        """Abort a request, unless its answer has `ended`."""

    @abstractmethod
    async def empty_cache(self) -> None:
        """Empty the prefix caches of all ranks. Raises `Overloaded` while blocks are in use,
        `Unsupported` or `WorkerFailed`."""

    async def close_engine(self) -> None:
        """Stop the engine and its processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await to_thread(llm.shutdown)

    def failure_by(self, error: Exception) -> DynamoError:
        """Return the error of a request that failed by `error`."""
        return WorkerFailed(f"{self.title} failed: {error!r}")

    async def start(self) -> EngineInfo:
        path = self.inputs.files.path
        if not await to_thread(path.is_dir):
            raise ModelUnavailable(
                f"{self.title} reads folders with a config.json and safetensors; {path} is not one",
                hint="`dynamo export FOLDER MODEL` writes one from a GGUF file",
            )
        cache = await to_thread(open_compile_cache, self.inputs.settings, self.inputs.files)
        if cache is not None:
            await to_thread(cache.fetch)
            os.environ.update(cache.environment)  # the engine and its libraries read them there
        await self.processes.open()
        try:
            self._info = info = await self.open_engine()
        except BaseException:
            await self.stop()
            raise
        for rank in self._ranks:
            rank.total_blocks = info.num_blocks // len(self._ranks)
        self.failure = None
        if cache is not None:
            self.tasks.start(to_thread(cache.save), "compile cache")
        return info

    def set_ranks(
        self, count: int, endpoint: KvEventEndpoint | None = None, block_tokens: int = 0
    ) -> None:
        """Set so many ranks, whose views are still to be opened. `endpoint`: where the first one
        publishes. `block_tokens`: size of the engine's blocks, if known."""
        size = self.inputs.card.block_tokens
        self._ranks = tuple(
            self.rank_type(size, block_tokens, endpoint and endpoint.of_rank(rank))
            for rank in range(count)
        )

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        info = self._info
        assert info is not None  # noqa: S101 - the engine has started
        ids = list(unpack_ids(request.token_ids))
        check_prompt(ids, info.context_tokens, info.vocab_size)
        request = _limit_tokens(request, info.context_tokens - len(ids))
        index, number = self._choose_rank(request), next(self._numbers)
        rank, answer = self._ranks[index], ForeignAnswer(request, reply, self._totals)
        rank.enter(answer)
        try:
            if context.attempt:
                answer.begin()
            with Interruptible(self._calls):
                await self._compute(Computation(request, context, ids, index, number), answer)
        finally:
            rank.leave(answer)

    async def _compute(self, computation: Computation, answer: ForeignAnswer) -> None:
        """Pass all outputs on. Longer times between two of them than the target are slow. A
        cancellation aborts the request."""
        request, rank = computation.request, self._ranks[computation.rank]
        target_s, last_s = request.itl_slo_ms * 1e-3, 0.0
        stream = self.begin_stream(computation)
        try:
            while (output := await self.next_output(stream)) is not None:
                rank.steps += self.steps_per_output
                if target_s:
                    now = self.inputs.clock.now()
                    if last_s:
                        rank.on_gap(slow=now - last_s > target_s)
                    last_s = now
                if not self.forward(output, answer):
                    return
            raise WorkerFailed(f"{self.title} ended the answer without a reason")
        finally:
            await self.close_stream(stream, ended=answer.ended)

    def begin_stream(self, computation: Computation) -> Any:
        """Return what `open_stream` does. Raises `InvalidRequest` or `failure_by`."""
        try:
            return self.open_stream(computation)
        except DynamoError:
            raise
        except Exception as error:
            raise self._request_error(error, (TypeError, *self.refusals)) from error

    async def next_output(self, stream: Any) -> Any:
        """Return the next output, or None at the end. Raises `InvalidRequest` or `failure_by`."""
        try:
            return await anext(stream, None)
        except DynamoError:
            raise
        except Exception as error:
            raise self._request_error(error, self.refusals) from error

    def _request_error(
        self, error: Exception, refusals: tuple[type[Exception], ...]
    ) -> DynamoError:
        """Return what an error of the engine means for the request."""
        if isinstance(error, refusals):
            return InvalidRequest(f"{self.title} refuses the request: {error}")
        return self.failure_by(error)

    async def clear_blocks(self) -> int:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        clears = [rank.blocks.clears for rank in self._ranks]
        count = sum(rank.cached_blocks for rank in self._ranks)
        with Interruptible(self._calls):  # vLLM never answers this call if its core dies
            await self.empty_cache()
        for rank, clears_before in zip(self._ranks, clears, strict=True):
            rank.clear(clears_before)
        return count

    def _choose_rank(self, request: GenerateRequest) -> int:
        ranks = range(len(self._ranks))
        if request.rank is not None and request.rank in ranks:
            return request.rank
        return min(ranks, key=lambda index: len(self._ranks[index].answers))

    @property
    def ranks(self) -> Sequence[ViewedRank]:
        return self._ranks

    def report_load(self) -> Load:
        loads = tuple(rank.report_load() for rank in self._ranks)
        return loads[0] if len(loads) == 1 else replace(sum_loads(loads), ranks=loads)

    def totals(self) -> EngineTotals:
        self._totals.steps = sum(rank.steps for rank in self._ranks)
        return self._totals

    def on_failure(self, listener: Callable[[], None]) -> None:
        self._failure_listeners.append(listener)

    async def stop(self) -> None:
        self._interrupt(WorkerFailed("the engine was stopped"))
        if self._info is None:  # a start may still continue in its thread
            await self.processes.close()
        await self.processes.close_after(self._shut_down)

    async def _shut_down(self) -> None:
        await self.tasks.close()
        for rank in self._ranks:
            await rank.close()
        await self.close_engine()

    def fail(self, reason: str) -> None:
        """End all requests and report that the engine cannot continue. A second call does
        nothing."""
        if self.failure is not None:
            return
        log.error(reason)
        self._interrupt(WorkerFailed(reason))
        for listener in self._failure_listeners:
            listener()

    def _interrupt(self, failure: WorkerFailed) -> None:
        self.failure = failure
        for call in tuple(self._calls):
            call.interrupt(WorkerFailed(failure.message))


def _limit_tokens(request: GenerateRequest, room: int) -> GenerateRequest:
    """Return a request whose answer has at most `room` tokens, and at least no more than that."""
    stops = request.stops
    most = min(stops.max_tokens, room)
    least = min(stops.min_tokens, most)
    if (most, least) == (stops.max_tokens, stops.min_tokens):
        return request
    return replace(request, stops=replace(stops, max_tokens=most, min_tokens=least))
