"""`ExternalEngine`: what adapters of foreign engines in this process share."""

from __future__ import annotations

import logging
from abc import abstractmethod
from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ModelUnavailable, WorkerFailed
from dynamo.core.reply import Engine, LogprobsPerToken, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineInfo,
    EngineTotals,
    Finish,
    FinishReason,
    GenerateRequest,
    Load,
    PromptTokenLogprob,
    Started,
    sum_loads,
)
from dynamo.inference.engines.kv_view import EngineKvView, ViewedRank
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.inference.engines.prompt_check import check_prompt
from dynamo.runtime.calls.interruptible import Interruptible

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs

log = logging.getLogger(__name__)

GREEDY: Final = 1e-6
"""Temperatures below this choose the most probable token."""


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


class EngineAnswer:
    """Passes the answer to one request on. `tokens`: ids that the engine has generated so far.
    `cached_tokens`: those of the prompt that it had cached, None before the first token.
    `prompt_logprobs`: those of the second prompt token and on, where the request wants them."""

    def __init__(self, reply: Reply, prompt_tokens: int) -> None:
        self._reply = reply
        self._prompt_tokens = prompt_tokens
        self._begun = False
        self.tokens = 0
        self.cached_tokens: int | None = None
        self.prompt_logprobs: tuple[PromptTokenLogprob, ...] = ()

    def begin(self, cached_tokens: int = 0) -> None:
        """Begin the reply, unless it has begun."""
        if not self._begun:
            self._begun = True
            self._reply.begin(
                Started(cached_tokens=cached_tokens, prompt_tokens=self._prompt_tokens)
            )

    def send(
        self, ids: Sequence[int], logprobs: LogprobsPerToken | None, cached_tokens: int
    ) -> bool:
        """Pass the next ids on. False: no more is wanted."""
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens
            self.begin(cached_tokens)
        self.tokens += len(ids)
        return self._reply.tokens(ids, logprobs)

    def finish(self, reason: FinishReason, stop_token: int | None = None, kv: bytes = b"") -> None:
        """End the answer. The `stop_token` is counted and was not sent."""
        self.begin()
        self.tokens += stop_token is not None
        end = Finish(reason, self.tokens, stop_token, kv, prompt_logprobs=self.prompt_logprobs)
        self._reply.finish(end)


class ExternalRank(ViewedRank):
    """A data-parallel rank, whose load is known by the requests that it was given."""

    def __init__(self, view: EngineKvView) -> None:
        super().__init__(view)
        self._prompts: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    @property
    def requests(self) -> int:
        """The number of requests in the rank."""
        return len(self._lengths)

    def on_request(self, number: int, prompt_tokens: int) -> None:
        """Count a request by a number of its own."""
        self._prompts[number] = self._lengths[number] = prompt_tokens

    def on_tokens(self, number: int, tokens: int) -> None:
        """Count new tokens of a request. Its prompt is computed now."""
        self.steps += 1
        self._prompts.pop(number, None)
        self._lengths[number] += tokens

    def on_request_ended(self, number: int) -> None:
        """Forget a request."""
        self._prompts.pop(number, None)
        del self._lengths[number]

    def report_load(self) -> Load:
        size = self.view.blocks.block_tokens
        active = sum(-(-length // size) for length in self._lengths.values())
        return Load(
            running=len(self._lengths) - len(self._prompts),
            waiting=len(self._prompts),
            prefill_tokens=sum(self._prompts.values()),
            active_blocks=min(active, self.total_blocks),
            total_blocks=self.total_blocks,
            steps=self.steps,
            cached_blocks=self.cached_blocks,
        )


class Computation(NamedTuple):
    """A request with its prompt `ids` and its context, on the rank with this index. `number`: its
    own in the engine."""

    request: GenerateRequest
    context: Context
    ids: list[int]
    rank: int
    number: int


class ExternalEngine(Engine):
    """A foreign engine in this process, with its workers in others. A subclass starts it, has it
    compute single requests, and stops it. `title` is its name in messages."""

    title: str
    rank_type: type[ExternalRank] = ExternalRank

    def __init__(self, inputs: EngineInputs) -> None:
        self.inputs = inputs
        self.tasks = BackgroundTasks()
        self.processes = EngineProcesses()
        self._ranks: tuple[ExternalRank, ...] = ()
        self._info: EngineInfo | None = None
        self._failure_listeners: list[Callable[[], None]] = []
        self._calls: set[Interruptible] = set()
        self._numbers = count()
        self._totals = EngineTotals()
        self.failure = WorkerFailed("the engine has not started")

    @abstractmethod
    async def open_engine(self) -> EngineInfo:
        """Start the engine and set its ranks. Raises `ModelUnavailable` or `ConfigError`."""

    @abstractmethod
    async def compute(self, computation: Computation, answer: EngineAnswer) -> None:
        """Compute one request. A cancellation aborts it. Raises `InvalidRequest` or
        `WorkerFailed`."""

    @abstractmethod
    async def empty_cache(self) -> None:
        """Empty the prefix caches of all ranks. Raises `Overloaded` while blocks are in use,
        `Unsupported` or `WorkerFailed`."""

    @abstractmethod
    async def close_engine(self) -> None:
        """Stop the engine and its processes."""

    async def start(self) -> EngineInfo:
        path = self.inputs.files.path
        if not await to_thread(path.is_dir):
            raise ModelUnavailable(
                f"{self.title} reads folders with a config.json and safetensors; {path} is none",
                hint="`dynamo export FOLDER MODEL` writes one from a GGUF file",
            )
        await self.processes.open()
        try:
            self._info = info = await self.open_engine()
        except BaseException:
            await self.stop()
            raise
        for rank in self._ranks:
            rank.total_blocks = info.num_blocks // len(self._ranks)
        self.failure = None
        return info

    def set_ranks(self, views: Sequence[EngineKvView]) -> None:
        """Set one rank for each view."""
        self._ranks = tuple(map(self.rank_type, views))

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        info = self._info
        assert info is not None  # noqa: S101 - the engine has started
        ids = list(unpack_ids(request.token_ids))
        check_prompt(ids, info.context_tokens, info.vocab_size)
        index, number = self._choose_rank(request), next(self._numbers)
        rank, answer = self._ranks[index], EngineAnswer(reply, len(ids))
        rank.on_request(number, len(ids))
        prediction = rank.view.drift.on_submitted(request.token_ids, request.salt)
        self._totals.requests += 1
        self._totals.prompt_tokens += len(ids)
        if context.attempt:
            answer.begin()
        try:
            with Interruptible(self._calls):
                await self.compute(Computation(request, context, ids, index, number), answer)
        finally:
            rank.on_request_ended(number)
            self._totals.generated_tokens += answer.tokens
            self._totals.cached_tokens += answer.cached_tokens or 0
            computed = request.kv or request.prompt_logprobs is not None  # whatever is cached
            cached_tokens = None if computed else answer.cached_tokens
            rank.view.drift.on_ended(prediction, cached_tokens)

    async def clear_blocks(self) -> int:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        clears = [rank.view.blocks.clears for rank in self._ranks]
        count = sum(rank.cached_blocks for rank in self._ranks)
        with Interruptible(self._calls):  # vLLM never answers this call if its core dies
            await self.empty_cache()
        for rank, clears_before in zip(self._ranks, clears, strict=True):
            rank.view.clear(clears_before)
        return count

    def max_tokens(self, request: GenerateRequest, prompt_tokens: int) -> int:
        """Return how many tokens the answer may have."""
        info = self._info
        assert info is not None  # noqa: S101 - the engine has started
        return min(request.stops.max_tokens, info.context_tokens - prompt_tokens)

    def _choose_rank(self, request: GenerateRequest) -> int:
        ranks = range(len(self._ranks))
        if request.rank is not None and request.rank in ranks:
            return request.rank
        return min(ranks, key=lambda index: self._ranks[index].requests)

    @property
    def ranks(self) -> Sequence[ExternalRank]:
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
        if self._info is None:  # a start may still go on in its thread
            await self.processes.close()
        await self.processes.close_after(self._shut_down)

    async def _shut_down(self) -> None:
        await self.tasks.close()
        for rank in self._ranks:
            await rank.view.close()
        await self.close_engine()

    def fail(self, reason: str) -> None:
        """End all requests and report that the engine cannot go on. A second call does nothing."""
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
