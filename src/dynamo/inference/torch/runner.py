"""The torch runner: the decoder on KV blocks in place, on a card or on the CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import EngineInfo
from dynamo.inference.model_runner import BlockShape, StepPlan, StepResult
from dynamo.inference.native.decoder import DecoderModel
from dynamo.inference.native.engine_sizing import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    plan_engine_info,
    usable_cores,
)
from dynamo.inference.native.kv_storage import KvShape, allocate_region
from dynamo.inference.native.weights_digest import DigestedWeights
from dynamo.inference.native.weights_runner import WeightsRunner
from dynamo.inference.tiers.opening import memory_above_host, plan_host_blocks
from dynamo.inference.torch.backend import TorchBackend
from dynamo.inference.torch.batch import make_paged_batch, make_spare_batch, row_order
from dynamo.inference.torch.card_memory import card_budget, check_weights, measure_kv_bytes
from dynamo.inference.torch.device import TorchDevice
from dynamo.inference.torch.device_region import DeviceRegion
from dynamo.inference.torch.graphs import DecodeGraphs
from dynamo.inference.torch.run_ahead import RunAhead
from dynamo.inference.torch.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo.inference.model_runner import StepChunk
    from dynamo.inference.torch.batch import PagedBatch
    from dynamo.models.checkpoint.decoder_config import DecoderConfig
    from dynamo.models.checkpoint.weights import ModelWeights


class TorchRunner(WeightsRunner):
    """Runs one model on `device`. All tensors belong to the runner's thread, which also calls
    `open_weights`. `memory_bytes` 0: all that is available."""

    backend_class = TorchBackend

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
        super().__init__("torch", open_weights, settings, context_tokens, memory_bytes, cache)
        self._device = torch.device(device.name)
        self._dtype = device.dtype
        self._is_apart = device.name != "cpu"
        """The blocks lie in memory of their own, from which peers and tiers copy."""
        self._graphs: DecodeGraphs | None = None
        self.runs_ahead = device.name == "cuda"

    def _load_model(self) -> EngineInfo:
        torch.set_num_threads(self._settings.threads or usable_cores())
        torch.set_grad_enabled(False)  # on this thread
        weights = DigestedWeights(self._open_weights())
        with weights:
            config = weights.config
            shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, self._dtype)
            context = min(self._context_tokens or config.context_tokens, config.context_tokens)
            on_card = self._device.type == "cuda"
            info = None if on_card else self._plan_engine(config, shape, self._memory_bytes)
            budget = card_budget(self._settings) if on_card else 0
            if info is None:
                check_weights(config, shape, context, budget)
            rotary = weights.rotary(context if info is None else info.context_tokens)
            dtype = getattr(torch, self._dtype)
            self._backend = self.backend_class(config, rotary, self._device, dtype)
            try:
                self._model = DecoderModel(weights, self._backend)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ModelUnavailable(f"the weights do not fit into memory: {error}") from error
        self._block_tokens = self._settings.block_size
        if info is None:
            step = partial(self._compute_largest_step, shape)
            kv_bytes = measure_kv_bytes(self._settings, shape, context, budget, step)
            info = self._plan_engine(config, shape, budget, kv_bytes)
        self._backend.attention.kv_blocks = self._allocate_blocks(info, shape)
        if on_card and self._settings.tensor_parallel_size == 1:  # a graph sends no step to ranks
            width = -(-info.context_tokens // self._block_tokens)
            sizes = info.max_num_seqs, width, info.num_blocks, self._block_tokens
            self._graphs = DecodeGraphs(self._model.forward, *sizes, self._device)
        self._run_ahead = RunAhead(self._forward, self._block_tokens, self._device)
        if self.region is not None:
            self.region.kv_layout = shape.layout(weights.digest, info.block_tokens)
        kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[self._dtype]
        self.layout = f"native-1 {kind} {info.block_tokens} {weights.digest}"
        self.block_shape = BlockShape(info.block_tokens, config.head_dim, self._dtype)
        return info

    def _plan_engine(
        self, config: DecoderConfig, shape: KvShape, memory_bytes: int, kv_bytes: int = 0
    ) -> EngineInfo:
        """Return the sizes of the engine. `kv_bytes`: measured room for blocks; 0: a share."""
        ranks = self._settings.data_parallel_size
        limit = self._cache.max_cache_size // ranks
        return plan_engine_info(
            self._settings,
            config,
            shape,
            self._context_tokens,
            memory_bytes if kv_bytes else memory_above_host(self._cache, ranks, memory_bytes),
            min(kv_bytes, limit or kv_bytes) or limit,
        )

    def _compute_largest_step(self, shape: KvShape) -> None:
        """Compute a step of all tokens that one may have, over one block."""
        settings = self._settings
        tokens = settings.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
        samples = min(tokens, settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS)
        self._backend.attention.kv_blocks = self._empty_blocks(1, shape)
        batch = make_spare_batch(
            1, tokens, -(-tokens // self._block_tokens), 0, self._block_tokens, self._device
        )
        logits = self._model.forward(batch._replace(sampled_rows=batch.positions[:samples]))
        torch.softmax(logits.double(), -1).sort(-1)  # as much as filters take

    def _empty_blocks(self, count: int, shape: KvShape) -> torch.Tensor:
        dims = shape.num_layers, 2, shape.num_kv_heads, self._block_tokens, shape.head_dim
        dtype = getattr(torch, self._dtype)
        return torch.empty(count, *dims, dtype=dtype, device=self._device)

    def _allocate_blocks(self, info: EngineInfo, shape: KvShape) -> torch.Tensor:
        """Return the memory of the blocks, and make the region of the runner over it or in it. On a
        card one more block follows, which pads steps."""
        block_bytes, count = shape.token_bytes * info.block_tokens, info.num_blocks
        ranks, free_bytes = self._settings.data_parallel_size, self._memory_bytes
        host_blocks = plan_host_blocks(self._cache, ranks, count, block_bytes, free_bytes)
        if self._is_apart:
            blocks = self._empty_blocks(count + 1, shape)
            self.region = allocate_region(
                host_blocks, block_bytes, lambda: DeviceRegion.over(blocks[:count], host_blocks)
            )
            return blocks
        self.region = allocate_region(count + host_blocks, block_bytes)
        if self.region is None:
            return self._empty_blocks(count, shape)
        memory = self.region.memory[: count * block_bytes]
        flat = torch.frombuffer(memory, dtype=getattr(torch, self._dtype))
        dims = shape.num_layers, 2, shape.num_kv_heads, info.block_tokens, shape.head_dim
        return flat.view(count, *dims)

    def _forward(
        self, batch: PagedBatch, read_rows: Callable[[Any], None] | None = None
    ) -> torch.Tensor:
        """Return the logits of the sampled rows, by a graph where the step has one."""
        logits: torch.Tensor | None = None
        if self._graphs is not None and read_rows is None:
            logits = self._graphs.run(batch)
        return self._model.forward(batch, read_rows) if logits is None else logits

    def _compute_step(self, plan: StepPlan) -> StepResult:
        ahead = self._run_ahead.take(plan.chunks)
        chunks = [chunk for number, chunk in enumerate(plan.chunks) if number not in ahead]
        logits = None
        if chunks:
            batch = make_paged_batch(chunks, self._block_tokens, self._device)
            reader = self._prompt_reader(chunks, batch) if plan.new_tokens else None
            logits = self._forward(batch, reader)
        if ahead:
            logits = self._run_ahead.join(ahead, plan.chunks, logits)
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        on_tokens = partial(self._run_ahead.start, plan) if self.runs_ahead else None
        result = StepResult(*sample(logits, sequences, on_tokens))
        if not sequences and self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # others may read the blocks from now on
        return result

    def _prompt_reader(
        self, chunks: Sequence[StepChunk], batch: PagedBatch
    ) -> Callable[[Any], None] | None:
        """Return what reads the logprobs of prompts in this step; None where none are wanted."""
        prompts = [
            (chunks[number], span.low)
            for number, span in zip(row_order(chunks), batch.spans, strict=True)
            if chunks[number].sequence.wants_prompt_logprobs
        ]
        if not prompts:
            return None
        from dynamo.inference.native.prompt_logprobs import read_prompt_logprobs

        parts, first_rows = zip(*prompts, strict=True)
        model = self._model
        return lambda rows: read_prompt_logprobs(
            parts, first_rows, rows, lambda part: model.project(part).cpu().numpy()
        )
