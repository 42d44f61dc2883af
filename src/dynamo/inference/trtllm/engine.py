"""`TrtllmEngine`: TensorRT-LLM's LLM in this process, with its workers in others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, Unsupported, WorkerFailed
from dynamo.core.host.pids import start_ticks
from dynamo.core.values import EngineInfo, Feature, GenerateRequest
from dynamo.inference.engines.answer import ForeignAnswer
from dynamo.inference.engines.arguments import engine_arguments
from dynamo.inference.engines.engine import NEUTRAL_SAMPLING, Computation, MultiprocessEngine
from dynamo.inference.engines.engine_events import PolledEventReader
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.inference.engines.startup import starting
from dynamo.inference.probe import CANARY_REQUEST
from dynamo.inference.trtllm.requests import TrtllmTranslator

EVENT_BUFFER: Final = 100_000
"""Events that TensorRT-LLM keeps until they are polled."""
POLL_TIMEOUT_S: Final = 0.2
POLLS_AT_START: Final = 25
"""Polls for the size of the KV cache, which comes soon after the first token."""
CHECK_INTERVAL_S: Final = 0.2
CANARY_TIMEOUT_S: Final = 20.0
POLL_INTERVAL_S: Final = 0.01
IDLE_POLL_INTERVAL_S: Final = 0.05
SALTED: Final = "the events of TensorRT-LLM do not tell the salt of a prompt"


class TrtllmEngine(MultiprocessEngine):
    """Sends token ids to `generate_async`, and polls KV events and statistics."""

    title = "TensorRT-LLM"

    async def open_engine(self) -> EngineInfo:
        arguments = engine_arguments(self.inputs.settings)
        cache = arguments.setdefault("kv_cache_config", {})
        cache.setdefault("tokens_per_block", self.inputs.card.block_tokens)
        cache.setdefault("event_buffer_max_size", EVENT_BUFFER)
        arguments.setdefault("skip_tokenizer_init", "guided_decoding_backend" not in arguments)
        attention_ranks = arguments.get("enable_attention_dp")
        count = arguments.get("tensor_parallel_size", 1) if attention_ranks else 1
        size = cache["tokens_per_block"]
        self.set_ranks(count, block_tokens=size)
        path = self.inputs.files.path
        self._llm = await asyncio.to_thread(_start, path, arguments, self.processes)
        self._translator = TrtllmTranslator(self.inputs.card.eos_token_ids)
        self._events = PolledEventReader(size)
        await self._compute_token()
        for _ in range(POLLS_AT_START):
            await self._poll()
            if self._events.capacity_blocks:
                break
        self.tasks.start(self._poll_events(), "KV events of TensorRT-LLM")
        running = await asyncio.to_thread(self.processes.find)
        self.tasks.start(self._watch_processes(set(running)), "processes of TensorRT-LLM")
        return self._describe(arguments, count)

    def _describe(self, arguments: Mapping[str, Any], ranks: int) -> EngineInfo:
        card, limits = self.inputs.card, self._llm.args
        cache = arguments["kv_cache_config"]
        blocks = self._events.capacity_blocks
        if not blocks:
            blocks = (cache.get("max_tokens") or 0) // cache["tokens_per_block"]
        features: list[Feature] = ["logprobs", "extra"]
        if "guided_decoding_backend" in arguments:
            features.append("structured")
        return EngineInfo(
            engine="trtllm",
            block_tokens=card.block_tokens,
            num_blocks=blocks * ranks * cache["tokens_per_block"] // card.block_tokens,
            context_tokens=limits.max_seq_len or card.context_tokens,
            max_num_seqs=(limits.max_batch_size or 256) * ranks,
            max_num_batched_tokens=limits.max_num_tokens or card.context_tokens,
            vocab_size=card.vocab_size,
            data_parallel=ranks,
            prefix_caching=bool(cache.get("enable_block_reuse", True)),
            kv_events=bool(cache.get("enable_block_reuse", True)),
            features=tuple(features),
            sampling={**NEUTRAL_SAMPLING, **card.generation},
        )

    async def _compute_token(self) -> None:
        """Compute one token. Before its first request the executor has no KV events, and some
        versions raise when they are polled. Raises `WorkerFailed`."""
        stream = self.begin_stream(Computation(CANARY_REQUEST, Context("canary"), [0], 0, 0))
        if await self.next_output(stream) is None:
            raise WorkerFailed("TensorRT-LLM ended the answer without a reason")

    def open_stream(self, computation: Computation) -> Any:
        request, _, ids, rank, _ = computation
        params = self._translator.sampling_params(request)
        options = self._options(request, rank)
        return self._llm.generate_async(ids, params, streaming=True, **options)

    def forward(self, output: Any, answer: ForeignAnswer) -> bool:
        return self._translator.forward(output, answer)

    async def close_stream(self, stream: Any, *, ended: bool) -> None:
        if not (ended or stream.finished):
            stream.abort()

    def _options(self, request: GenerateRequest, rank: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if request.salt:
            options["cache_salt"] = request.salt
            for other in self.ranks:
                if not other.kv_problem:
                    other.blocks.distrust(SALTED)
        if len(self.ranks) > 1:
            scheduling = import_module("tensorrt_llm.scheduling_params").SchedulingParams
            options["scheduling_params"] = scheduling(
                attention_dp_rank=rank, attention_dp_relax=False
            )
        return options

    async def empty_cache(self) -> None:
        raise Unsupported(
            "TensorRT-LLM cannot empty its prefix cache while it serves",
            hint="restart the worker: dynamo restart",
        )

    async def _poll_events(self) -> None:
        is_healthy = getattr(self._llm, "_check_health", lambda: True)
        while True:
            try:
                busy = await self._poll()
            except Exception as error:  # noqa: BLE001 - whatever ends the executor
                self.fail(f"TensorRT-LLM has died: {error!r}")
                return
            if not is_healthy():
                self.fail("TensorRT-LLM has died: its executor is shut down")
                return
            await asyncio.sleep(POLL_INTERVAL_S if busy else IDLE_POLL_INTERVAL_S)

    async def _watch_processes(self, running: set[int]) -> None:
        """Notice the death of the workers, after which polls return nothing and requests wait for
        ever. Helpers end, too, so that the engine must compute a token after each end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            ended = {process for process in running if not start_ticks(process)}
            if not ended:
                continue
            running -= ended
            try:
                async with asyncio.timeout(CANARY_TIMEOUT_S):
                    await self._compute_token()
            except (TimeoutError, DynamoError):
                self.fail("a process of TensorRT-LLM has died, and it computes no more")
                return

    async def _poll(self) -> bool:
        """Apply the KV events that have come, and return whether there were some. Blocks a thread
        until there are, or for `POLL_TIMEOUT_S`; some versions do not wait while they are idle."""
        events = await asyncio.to_thread(self._llm.get_kv_cache_events, POLL_TIMEOUT_S)
        for rank, batch in self._events.read(events or ()).items():
            if rank < len(self.ranks):
                self.ranks[rank].blocks.apply_batch(batch)
        return bool(events)


def _start(path: Path, arguments: Mapping[str, Any], processes: EngineProcesses) -> Any:
    """Return a started LLM. Blocks until its workers have loaded the weights."""
    with starting("TensorRT-LLM", "tensorrt_llm", processes):
        module = import_module("tensorrt_llm")
        config = import_module("tensorrt_llm.llmapi").KvCacheConfig(**arguments["kv_cache_config"])
        return module.LLM(model=str(path), **{**arguments, "kv_cache_config": config})
