"""`VllmEngine`: vLLM's AsyncLLM in this process, with its engine cores in others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from itertools import count
from typing import Any

from msgspec.structs import replace

from dynamo.core.adapters import adapter_name
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InvalidRequest, ModelNotFound, Overloaded, WorkerFailed
from dynamo.core.timing.learner import TimingLearner
from dynamo.core.timing.model import Counts
from dynamo.core.values import EngineInfo, EngineTotals, Feature, GenerateRequest
from dynamo.inference.engines.arguments import engine_arguments, needs_connector
from dynamo.inference.engines.engine import NEUTRAL_SAMPLING, Computation, MultiprocessEngine
from dynamo.inference.engines.event_reader import choose_loopback_endpoint
from dynamo.inference.engines.lora_adapters import FolderAdapters, check_lora_modules
from dynamo.inference.engines.rank import ViewedRank
from dynamo.inference.vllm.kv_connector import (
    CONNECTOR_CONFIG,
    VllmKvConnector,
    connector_environment,
    loads_kv,
)
from dynamo.inference.vllm.requests import RequestTranslator, forward_output
from dynamo.inference.vllm.startup import accepted, start_llm
from dynamo.models.grammar.grammar_text import allows_token_ids
from dynamo.telemetry.trace_context import exports_traces, trace_headers


class VllmAdapters(FolderAdapters):
    """The adapters that a started AsyncLLM has loaded. vLLM loads one again when it needs it and
    has had to make room for others."""

    def __init__(self, llm: Any, modules: Sequence[str] = ()) -> None:
        super().__init__(modules)
        self._llm = llm
        self._requests: dict[str, Any] = {}
        self._numbers = count(1)

    def find(self, adapter: str) -> Any:
        """Return vLLM's LoRARequest for an adapter's id. Raises `ModelNotFound`."""
        request = self._requests.get(adapter)
        if request is None:
            raise ModelNotFound(
                f"LoRA adapter {adapter_name(adapter)!r} is not loaded", param="model"
            )
        return request

    async def load_weights(self, adapter: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

        name = adapter_name(adapter)
        request = LoRARequest(adapter, next(self._numbers), path)  # equal names are one in a batch
        try:
            loaded = await self._llm.add_lora(request)
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            raise InvalidRequest(
                f"vLLM cannot load LoRA adapter {name!r} from {path}: {reason}", param="lora_path"
            ) from error
        if not loaded:
            raise InvalidRequest(f"vLLM did not load LoRA adapter {name!r} from {path}")
        self._requests[adapter] = request

    async def unload_weights(self, adapter: str) -> None:
        await self._llm.remove_lora(self._requests.pop(adapter).lora_int_id)


FEATURES: tuple[Feature, ...] = (
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "structured",
    "extra",
)
GRAMMAR_BACKEND = "guidance"
"""vLLM's name of the library that knows grammars of calls. An engine has one for all forms."""
HEALTH_CHECK_INTERVAL_S = 0.5
EMPTY_RETRY_S = 0.2
SHUTDOWN_TIMEOUT_S = 5.0
BLOCKS_IN_USE = "Failed to reset KV cache"
"""Begin of the message of vLLM's scheduler if blocks stay in use without running requests."""
HUNG_S = 300.0
"""A rank hangs if it makes no step for this time after a request. Routers avoid it long before."""
MIN_WAIT_S = 20.0
"""Requests must have waited for so much of this time: a client may cancel one before its step."""
CORE_DIED = "the engine core of vLLM has died"
CORE_HANGS = f"the engine core of vLLM has requests and made no step for {HUNG_S:g} s"


class VllmRank(ViewedRank):
    """A rank of an AsyncLLM. vLLM reports only while it computes, so that an idle rank is known by
    the requests that it was given."""

    preemptions = _running = 0
    _step_ended_s = 0.0
    _usage = _checked_s = _waited_s = 0.0
    _last_steps = -1
    _waiting_since_s: float | None = None

    def hangs(self, now: float) -> bool:
        """Whether the rank hangs at the time `now`. Call this often. Requests of a hung rank move
        elsewhere, and probes come and go."""
        elapsed_s, self._checked_s = now - self._checked_s, now
        if self.steps != self._last_steps:
            self._last_steps = self.steps
            self._waiting_since_s, self._waited_s = None, 0.0
        if self.answers:
            if self._waiting_since_s is None:
                self._waiting_since_s = now
            else:
                self._waited_s += elapsed_s
        if self._waiting_since_s is None or self._waited_s < MIN_WAIT_S:
            return False
        return now - self._waiting_since_s > HUNG_S

    def on_statistics(self, scheduler: Any, iteration: Any) -> None:
        """Take over vLLM's statistics of one step; each may be None."""
        self.steps += 1
        if scheduler is not None and iteration is not None:
            self._learn(scheduler, iteration)
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._usage = scheduler.kv_cache_usage
        if iteration is not None:
            self.preemptions += getattr(iteration, "num_preempted_reqs", 0)

    def _learn(self, scheduler: Any, iteration: Any) -> None:
        """Learn from a step that followed another one without a pause. A prompt that took several
        steps counts for its last one."""
        ended_s = getattr(iteration, "iteration_timestamp", 0.0)
        before_s, self._step_ended_s = self._step_ended_s, ended_s
        if not (self._running and scheduler.num_running_reqs and 0 < before_s < ended_s):
            return
        if self.timing_learner is None:
            self.timing_learner = TimingLearner()
        cache = getattr(scheduler, "prefix_cache_stats", None)
        prompts = getattr(iteration, "num_prompt_tokens", 0)
        new_tokens = max(0, prompts - getattr(cache, "hits", 0))
        context = round(scheduler.kv_cache_usage * self.total_blocks * self.blocks.block_tokens)
        seqs = scheduler.num_running_reqs
        counts = Counts(new_tokens, seqs, seqs, context, new_tokens * new_tokens / 2)
        self.timing_learner.observe(counts, ended_s - before_s)
        if self.on_step is not None:
            self.on_step(seqs, ended_s - before_s)

    def count_running(self) -> int:
        return min(self._running, len(self.answers))

    def count_active_blocks(self) -> int:
        return round(self._usage * self.total_blocks) if self.answers else 0


class VllmEngine(MultiprocessEngine):
    """Sends token ids to AsyncLLM and passes its token ids on; nothing is decoded here."""

    title = "vLLM"
    rank_type = VllmRank
    ranks: Sequence[VllmRank]
    kv_connector: VllmKvConnector | None = None
    adapters: VllmAdapters | None = None
    steps_per_output = 0
    _sleep_level = 0
    _exported = _traced = False
    forward = staticmethod(forward_output)

    async def open_engine(self) -> EngineInfo:
        self._exported = exports_traces(os.environ)
        arguments = engine_arguments(self.inputs.settings)
        self._traced = "otlp_traces_endpoint" in arguments
        size = arguments.get("data_parallel_size", 1)
        self._open_ranks(arguments, size)
        settings, environment = self.inputs.settings, dict[str, str]()
        modules = settings.engine.lora_modules
        await asyncio.to_thread(check_lora_modules, modules)
        if needs_connector(settings):
            self.kv_connector = VllmKvConnector(self.generate, self.tasks)
            arguments["kv_transfer_config"] = dict(CONNECTOR_CONFIG)
            environment = connector_environment(settings, size)
        forms = arguments.setdefault("structured_outputs_config", {})
        forms.setdefault("backend", GRAMMAR_BACKEND)
        path, record = self.inputs.files.path, self._on_statistics
        self._llm = await asyncio.to_thread(
            start_llm, path, arguments, self.processes, record, environment
        )
        self._translator = RequestTranslator()
        self.refusals = self._translator.refusals
        if arguments.get("enable_lora"):
            self.adapters = adapters = VllmAdapters(self._llm, modules)
            await adapters.start()
        if self.kv_connector is not None:
            self.kv_connector.on_started(self._llm)
        self.tasks.start(self._watch_health(), "health of vLLM")
        of_model = await asyncio.to_thread(
            self._llm.vllm_config.model_config.get_diff_sampling_param
        )
        return replace(self._describe(size), sampling=NEUTRAL_SAMPLING | of_model)

    def _open_ranks(self, arguments: dict[str, Any], count: int) -> None:
        """Set the ranks, which listen for events from now on: none is lost in a start."""
        endpoint = None
        if arguments.get("enable_prefix_caching", True):
            endpoint = choose_loopback_endpoint(count)
            config = {"enable_kv_cache_events": True, **endpoint.publisher_config()}
            arguments["kv_events_config"] = config
        self.set_ranks(count, endpoint)
        for rank in self.ranks:
            rank.open()

    def _describe(self, ranks: int) -> EngineInfo:
        """Return the limits that vLLM has chosen, in blocks of the card's size."""
        config, card = self._llm.vllm_config, self.inputs.card
        cache, scheduler = config.cache_config, config.scheduler_config
        blocks = (cache.num_gpu_blocks - ranks) * cache.block_size // card.block_tokens
        for rank in self.ranks:
            rank.blocks.set_capacity(blocks // ranks)
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
            features=self._features(config),
        )

    def _features(self, config: Any) -> tuple[Feature, ...]:
        """Return what this vLLM can do with its settings."""
        reasoning = getattr(getattr(config, "reasoning_config", None), "enabled", False)
        forms = getattr(config, "structured_outputs_config", None)
        calls = getattr(forms, "backend", "") == GRAMMAR_BACKEND and allows_token_ids()
        return (
            *FEATURES,
            *(("calls",) if calls else ()),
            *(("form_after_reasoning",) if getattr(forms, "reasoning_parser", "") else ()),
            *(("thinking_budget",) if reasoning else ()),  # vLLM knows the model's markers
            *(() if self.adapters is None else ("adapters",)),
        )

    def open_stream(self, computation: Computation) -> Any:
        request, context, ids, index, number = computation
        stream = self._llm.generate(
            self._make_prompt(ids, request.salt),
            self._translator.sampling_params(request),
            f"{request.request_id}/{number}",
            **self._options(request, context, index),
        )
        if self.kv_connector is not None and loads_kv(request.kv):
            return self.kv_connector.load(stream)
        return stream

    async def close_stream(self, stream: Any, *, ended: bool) -> None:
        del ended
        await stream.aclose()

    def failure_by(self, error: Exception) -> DynamoError:
        """As in the interface. If the engine core has died, the engine fails."""
        if self._llm is None or self._llm.errored:
            # Not now: a call that interrupts itself would be cancelled once more later.
            asyncio.get_running_loop().call_soon(self.fail, CORE_DIED)
            return WorkerFailed(CORE_DIED)
        if getattr(error, "http_status", 0) in (429, 503):
            return Overloaded(f"vLLM takes no more requests: {error}")
        return WorkerFailed(f"vLLM failed: {error!r}")

    def _make_prompt(self, ids: list[int], salt: str) -> dict[str, Any]:
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
        return prompt | {"cache_salt": salt} if salt else prompt

    def _options(self, request: GenerateRequest, context: Context, rank: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if request.priority and self._llm.vllm_config.scheduler_config.policy == "priority":
            options["priority"] = -request.priority  # vLLM computes the lowest first
        if len(self.ranks) > 1:
            options["data_parallel_rank"] = rank
        if request.adapter and self.adapters is not None:
            options["lora_request"] = self.adapters.find(request.adapter)
        if self._traced:
            options["trace_headers"] = trace_headers(
                context, request.choice, exported=self._exported
            )
        return options

    def totals(self) -> EngineTotals:
        totals = super().totals()
        totals.preemptions = sum(rank.preemptions for rank in self.ranks)
        return totals

    async def empty_cache(self) -> None:
        reset = self._llm.reset_prefix_cache
        try:
            done = await reset(**accepted(reset, reset_running_requests=True))
        except Exception as error:
            if BLOCKS_IN_USE not in str(error):
                raise self.failure_by(error) from error
            done = False
        if not done:
            raise Overloaded(
                "vLLM does not empty its prefix cache while it is used by requests, or by KV that "
                "another worker will load"
            )

    def sleep_refusal(self, level: int) -> str:
        del level
        if self._llm.vllm_config.model_config.enable_sleep_mode:
            return ""
        return "vLLM was started without sleep mode; --engine-arg enable_sleep_mode=true needs CUDA"

    async def sleep(self, level: int) -> None:
        """As in the interface. KV that another worker will load stays until its lease ends."""
        self._sleep_level, now = level, self.inputs.clock.now
        lease_s = self.kv_connector.lease_s if self.kv_connector is not None else 0.0
        ends_s = now() + lease_s
        while True:
            try:
                await self.clear_blocks()
                break
            except Overloaded:
                if now() > ends_s:
                    raise
                await self.inputs.clock.sleep(EMPTY_RETRY_S)
        await self._llm.sleep(level)

    async def wake_up(self) -> None:
        """As in the interface. vLLM leaves memory without content where weights were (level 2)."""
        if self._sleep_level > 1:
            await self._llm.wake_up(tags=["weights"])
            await self._llm.collective_rpc("reload_weights")
            await self._llm.wake_up(tags=["kv_cache"])
        else:
            await self._llm.wake_up()

    async def close_engine(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            timeout = accepted(llm.shutdown, timeout=SHUTDOWN_TIMEOUT_S)
            await asyncio.to_thread(llm.shutdown, **timeout)

    def _on_statistics(self, rank: int, scheduler: Any, iteration: Any) -> None:
        self.ranks[rank].on_statistics(scheduler, iteration)
        if self.kv_connector is not None and scheduler is not None:
            self.kv_connector.on_statistics(getattr(scheduler, "kv_connector_stats", None))

    async def _watch_health(self) -> None:
        reason = ""
        while not reason:
            await asyncio.sleep(HEALTH_CHECK_INTERVAL_S)
            now = self.inputs.clock.now()
            if self._llm.errored:
                reason = CORE_DIED
            elif any(rank.hangs(now) for rank in self.ranks):
                reason = CORE_HANGS
        self.fail(reason)
