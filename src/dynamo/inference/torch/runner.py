"""The torch runner: the decoder on KV blocks in place, on a card or on the CPU."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import EngineInfo
from dynamo.inference.model_runner import BlockShape, ModelRunner, StepPlan, StepResult
from dynamo.inference.native.decoder import DecoderModel
from dynamo.inference.native.engine_sizing import (
    available_memory_bytes,
    plan_engine_info,
    usable_cores,
)
from dynamo.inference.native.kv_storage import KvShape, allocate_region
from dynamo.inference.native.weights_digest import DigestedWeights
from dynamo.inference.tiers.opening import memory_above_host, plan_host_blocks
from dynamo.inference.torch.backend import TorchBackend
from dynamo.inference.torch.batch import make_paged_batch, row_order
from dynamo.inference.torch.device import TorchDevice
from dynamo.inference.torch.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.inference.torch.batch import PagedBatch
    from dynamo.models.checkpoint.weights import ModelWeights


class TorchRunner(ModelRunner):
    """Runs one model on `device`. All tensors belong to the runner's thread, which also calls
    `open_weights`. `memory_bytes` 0: all that is available."""

    def __init__(
        self,
        open_weights: Callable[[], ModelWeights],
        settings: EngineSettings,
        device: TorchDevice,
        *,
        context_tokens: int = 0,
        memory_bytes: int = 0,
        cache: CacheSettings = NO_TIERS,
    ) -> None:
        self._open_weights = open_weights
        self._settings = settings
        self._cache = cache
        self._context_tokens = context_tokens
        self._memory_bytes = memory_bytes or available_memory_bytes()
        self._device = torch.device(device.name)
        self._dtype = device.dtype
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    async def start(self) -> EngineInfo:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._load_model)

    async def step(self, plan: StepPlan) -> StepResult:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._compute_step, plan)

    async def stop(self) -> None:
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        if hasattr(self, "_backend"):
            self._backend.stop()
        if self.region is not None:
            self.region.close()

    def _load_model(self) -> EngineInfo:
        torch.set_num_threads(self._settings.threads or usable_cores())
        torch.set_grad_enabled(False)  # on this thread
        weights = DigestedWeights(self._open_weights())
        with weights:
            config = weights.config
            shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, self._dtype)
            ranks = self._settings.data_parallel_size
            info = plan_engine_info(
                self._settings,
                config,
                shape,
                self._context_tokens,
                memory_above_host(self._cache, ranks, self._memory_bytes),
                self._cache.max_cache_size // ranks,
            )
            self._backend = TorchBackend(
                config,
                weights.rotary(info.context_tokens),
                self._device,
                getattr(torch, self._dtype),
            )
            try:
                self._model = DecoderModel(weights, self._backend)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ModelUnavailable(f"the weights do not fit into memory: {error}") from error
        self._block_tokens = info.block_tokens
        self._backend.attention.kv_blocks = self._allocate_blocks(info, shape)
        if self.region is not None:
            self.region.kv_layout = shape.layout(weights.digest, info.block_tokens)
        kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[self._dtype]
        self.layout = f"native-1 {kind} {info.block_tokens} {weights.digest}"
        self.block_shape = BlockShape(info.block_tokens, config.head_dim, self._dtype)
        return info

    def _allocate_blocks(self, info: EngineInfo, shape: KvShape) -> torch.Tensor:
        """Return the memory of the blocks. In host memory it lies in the region of the runner."""
        dims = (shape.num_layers, 2, shape.num_kv_heads, info.block_tokens, shape.head_dim)
        dtype = getattr(torch, self._dtype)
        block_bytes = shape.token_bytes * info.block_tokens
        host_blocks = plan_host_blocks(
            self._cache,
            self._settings.data_parallel_size,
            info.num_blocks,
            block_bytes,
            self._memory_bytes,
        )
        self.region = allocate_region(info.num_blocks + host_blocks, block_bytes)
        if self.region is None:
            return torch.empty(info.num_blocks, *dims, dtype=dtype)
        memory = self.region.memory[: info.num_blocks * block_bytes]
        return torch.frombuffer(memory, dtype=dtype).view(info.num_blocks, *dims)

    def _compute_step(self, plan: StepPlan) -> StepResult:
        batch = make_paged_batch(plan.chunks, self._block_tokens, self._device)
        logits = self._model.forward(batch, self._prompt_reader(plan, batch))
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        return StepResult(*sample(logits, sequences))

    def _prompt_reader(self, plan: StepPlan, batch: PagedBatch) -> Callable[[Any], None] | None:
        """Return what reads the logprobs of prompts in this step; None where none are wanted."""
        chunks, first_rows = [], []
        if plan.new_tokens:
            for number, span in zip(row_order(plan.chunks), batch.spans, strict=True):
                if plan.chunks[number].sequence.wants_prompt_logprobs:
                    chunks.append(plan.chunks[number])
                    first_rows.append(span.low)
        if not chunks:
            return None
        from dynamo.inference.native.prompt_logprobs import read_prompt_logprobs

        model = self._model
        return lambda rows: read_prompt_logprobs(
            chunks, first_rows, rows, lambda part: model.project(part).cpu().numpy()
        )
