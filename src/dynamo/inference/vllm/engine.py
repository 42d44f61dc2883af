"""`VllmEngine`: vLLM's AsyncLLM in this process, with its engine cores in others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, ModelUnavailable, Overloaded, WorkerFailed
from dynamo.core.reply import Engine, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineInfo,
    EngineTotals,
    Feature,
    GenerateRequest,
    Load,
    sum_loads,
)
from dynamo.inference.engines.arguments import engine_arguments
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.inference.external import EngineKvView, KvEventEndpoint, find_loopback_ports
from dynamo.inference.vllm.kv_connector import (
    CONNECTOR_CONFIG,
    VllmKvConnector,
    connector_environment,
)
from dynamo.inference.vllm.rank import VllmRank
from dynamo.inference.vllm.requests import OutputForwarder, RequestTranslator
from dynamo.inference.vllm.startup import accepted, start_llm
from dynamo.runtime.calls.interruptible import Interruptible

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs

log = logging.getLogger(__name__)

FEATURES: tuple[Feature, ...] = ("logprobs", "logit_bias", "structured", "extra")
HEALTH_CHECK_INTERVAL_S = 0.2
SHUTDOWN_TIMEOUT_S = 5.0
CORE_DIED = "the engine core of vLLM has died"


class VllmEngine(Engine):
    """Sends token ids to AsyncLLM and passes its token ids on; nothing is decoded here."""

    def __init__(self, inputs: EngineInputs) -> None:
        self._inputs = inputs
        self._processes = EngineProcesses()
        self._tasks = BackgroundTasks()
        self._failure_listeners: list[Callable[[], None]] = []
        self._calls: set[Interruptible] = set()
        self._numbers = count()
        self._totals = EngineTotals()
        self._llm: Any = None
        self.kv_connector: VllmKvConnector | None = None
        self._ranks: tuple[VllmRank, ...] = ()
        self._translator: RequestTranslator
        self.failure = WorkerFailed("the engine has not started")

    async def start(self) -> EngineInfo:
        settings, path = self._inputs.settings, self._inputs.files.path
        if not await asyncio.to_thread(path.is_dir):
            raise ModelUnavailable(
                f"vLLM reads folders with a config.json and safetensors; {path} is none",
                hint="`dynamo export FOLDER MODEL` writes one from a GGUF file",
            )
        await self._processes.open()
        try:
            return await self._start(engine_arguments(settings))
        except BaseException:
            await self.stop()
            raise

    async def _start(self, arguments: dict[str, Any]) -> EngineInfo:
        size = arguments.get("data_parallel_size", 1)
        self._ranks = self._open_ranks(arguments, size)
        settings, environment = self._inputs.settings, dict[str, str]()
        if settings.engine.role != "both":
            self.kv_connector = VllmKvConnector(self.generate, self._tasks)
            arguments["kv_transfer_config"] = dict(CONNECTOR_CONFIG)
            environment = connector_environment(settings, size)
        path, record = self._inputs.files.path, self._on_statistics
        self._llm = await asyncio.to_thread(
            start_llm, path, arguments, self._processes, record, environment
        )
        info = self._describe(size)
        self._translator = RequestTranslator(info.context_tokens, info.vocab_size)
        if self.kv_connector is not None:
            self.kv_connector.on_started(self._llm)
        self.failure = None
        self._tasks.start(self._watch_health(), "health of vLLM")
        return info

    def _open_ranks(self, arguments: dict[str, Any], count: int) -> tuple[VllmRank, ...]:
        """Return the ranks, which already listen for events: none is lost in a start."""
        caches = arguments.get("enable_prefix_caching", True)
        endpoint = self._choose_event_endpoint(arguments, count) if caches else None
        views = [
            EngineKvView(
                self._inputs.card.block_tokens,
                endpoint=None if endpoint is None else endpoint.of_rank(rank),
            )
            for rank in range(count)
        ]
        for view in views:
            view.open()
        return tuple(map(VllmRank, views))

    def _choose_event_endpoint(self, arguments: dict[str, Any], ranks: int) -> KvEventEndpoint:
        """Let vLLM publish its KV events on loopback. The publisher connects to this process: one
        that binds listens on every interface."""
        port = find_loopback_ports(2 * ranks)
        endpoint = f"tcp://127.0.0.1:{port}"
        replay = f"tcp://127.0.0.1:{port + ranks}"
        arguments["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "topic": "kv",
        }
        return KvEventEndpoint(endpoint, replay, bind=True)

    def _describe(self, ranks: int) -> EngineInfo:
        """Return the limits that vLLM has chosen, in blocks of the card's size."""
        config, card = self._llm.vllm_config, self._inputs.card
        cache, scheduler = config.cache_config, config.scheduler_config
        blocks = (cache.num_gpu_blocks - ranks) * cache.block_size // card.block_tokens
        for rank in self._ranks:
            rank.total_blocks = blocks // ranks
            rank.view.blocks.set_capacity(rank.total_blocks)
        return EngineInfo(
            engine="vllm",
            block_tokens=card.block_tokens,
            num_blocks=blocks,
            context_tokens=config.model_config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs * ranks,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            vocab_size=min(card.vocab_size or 1 << 31, config.model_config.get_vocab_size()),
            data_parallel=ranks,
            prefix_caching=bool(cache.enable_prefix_caching),
            kv_events=bool(cache.enable_prefix_caching),
            features=FEATURES,
        )

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None:
            raise WorkerFailed(self.failure.message)
        ids = self._translator.prompt_ids(request)
        params = self._translator.sampling_params(request, len(ids))
        index = self._choose_rank(request)
        rank, number = self._ranks[index], next(self._numbers)
        forwarder = OutputForwarder(reply, len(ids), request.top_logprobs)
        connector = self.kv_connector
        prediction = rank.on_request(number, request, len(ids))
        self._totals.requests += 1
        self._totals.prompt_tokens += len(ids)
        if context.attempt:
            forwarder.begin()
        try:
            with Interruptible(self._calls):
                stream = self._llm.generate(
                    self._make_prompt(ids, request.salt),
                    params,
                    f"{request.request_id}/{number}",
                    **self._options(request, context, index),
                )
                if request.kv and connector is not None:
                    stream = connector.load(stream)
                await self._forward(stream, forwarder, rank, number, request.itl_slo_ms * 1e-3)
        finally:
            self._totals.generated_tokens += forwarder.tokens
            self._totals.cached_tokens += forwarder.cached_tokens or 0
            cached_tokens = None if request.kv else forwarder.cached_tokens
            rank.on_request_ended(number, prediction, cached_tokens)

    async def _forward(
        self,
        stream: Any,
        forwarder: OutputForwarder,
        rank: VllmRank,
        number: int,
        target_s: float,
    ) -> None:
        """Pass all outputs on. `target_s`: a longer time between two of them is slow; 0: any."""
        last_s = 0.0
        async with aclosing(stream):
            while (output := await self._next_output(stream)) is not None:
                if target_s:
                    now = self._inputs.clock.now()
                    if last_s:
                        rank.on_gap(slow=now - last_s > target_s)
                    last_s = now
                if not forwarder.tokens:
                    rank.on_first_token(number)
                if not forwarder.forward(output):
                    return
        raise WorkerFailed("vLLM ended the answer without a reason")

    async def _next_output(self, stream: Any) -> Any:
        """Return the next output, or None at the end. Raises `InvalidRequest` or `WorkerFailed`."""
        try:
            return await anext(stream, None)
        except ValueError as error:
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error
        except Exception as error:
            if self._llm is None or self._llm.errored:
                # Not now: a call that interrupts itself would be cancelled once more later.
                asyncio.get_running_loop().call_soon(self._fail, CORE_DIED)
                raise WorkerFailed(CORE_DIED) from error
            raise WorkerFailed(f"vLLM failed: {error!r}") from error

    def _make_prompt(self, ids: list[int], salt: str) -> dict[str, Any]:
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
        return prompt | {"cache_salt": salt} if salt else prompt

    def _options(self, request: GenerateRequest, context: Context, rank: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if request.priority and self._llm.vllm_config.scheduler_config.policy == "priority":
            options["priority"] = -request.priority  # vLLM computes the lowest first
        if len(self._ranks) > 1:
            options["data_parallel_rank"] = rank
        if "traceparent" in context.metadata:
            options["trace_headers"] = {"traceparent": context.metadata["traceparent"]}
        return options

    def _choose_rank(self, request: GenerateRequest) -> int:
        count = len(self._ranks)
        if request.rank is not None and request.rank < count:
            return request.rank
        return min(range(count), key=lambda index: self._ranks[index].requests)

    @property
    def ranks(self) -> Sequence[VllmRank]:
        return self._ranks

    def report_load(self) -> Load:
        loads = tuple(rank.report_load() for rank in self._ranks)
        if len(loads) == 1:
            return loads[0]
        return replace(sum_loads(loads), ranks=loads)

    def totals(self) -> EngineTotals:
        self._totals.steps = sum(rank.steps for rank in self._ranks)
        self._totals.preemptions = sum(rank.preemptions for rank in self._ranks)
        return self._totals

    def on_failure(self, listener: Callable[[], None]) -> None:
        self._failure_listeners.append(listener)

    async def clear_blocks(self) -> int:
        reset = self._llm.reset_prefix_cache
        if not await reset(**accepted(reset, reset_running_requests=True)):
            raise Overloaded("vLLM does not empty its prefix cache while requests use it")
        return sum(rank.view.clear() for rank in self._ranks)

    async def stop(self) -> None:
        self._interrupt(WorkerFailed("the engine was stopped"))
        if self._llm is None:  # a start may still go on in its thread
            await self._processes.close()
        await self._processes.close_after(self._shut_down)

    async def _shut_down(self) -> None:
        await self._tasks.close()
        for rank in self._ranks:
            await rank.view.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            timeout = accepted(llm.shutdown, timeout=SHUTDOWN_TIMEOUT_S)
            await asyncio.to_thread(llm.shutdown, **timeout)

    def _on_statistics(self, rank: int, scheduler: Any, iteration: Any) -> None:
        self._ranks[rank].on_statistics(scheduler, iteration)
        if self.kv_connector is not None and scheduler is not None:
            self.kv_connector.on_statistics(getattr(scheduler, "kv_connector_stats", None))

    async def _watch_health(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(HEALTH_CHECK_INTERVAL_S)
        self._fail(CORE_DIED)

    def _fail(self, reason: str) -> None:
        if self.failure is not None:  # stopped, or known to have failed
            return
        log.error(reason)
        self._interrupt(WorkerFailed(reason))
        for listener in self._failure_listeners:
            listener()

    def _interrupt(self, failure: WorkerFailed) -> None:
        """End every request: vLLM would let them wait."""
        self.failure = failure
        for call in tuple(self._calls):
            call.interrupt(WorkerFailed(failure.message))


async def open_engine(inputs: EngineInputs) -> VllmEngine:
    """Create the engine of the settings. vLLM is imported when it starts."""
    return VllmEngine(inputs)


open_engine.has_ranks = True  # type: ignore[attr-defined]
