"""The native runner: computes whole steps on its own thread, so that the event loop stays free."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import EngineInfo
from dynamo.inference.model_runner import BlockShape, StepChunk, StepPlan, StepResult
from dynamo.inference.native.engine_sizing import plan_engine_info, usable_cores
from dynamo.inference.native.ragged import SlotChunk, make_ragged_batch
from dynamo.inference.native.weights_runner import WeightsRunner
from dynamo.inference.tiers.opening import memory_above_host, plan_host_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.inference.native.array_backend import Array
    from dynamo.inference.native.ragged import RaggedBatch
    from dynamo.inference.native.shared_weights import SharedWeights
    from dynamo.inference.native.weights_digest import DigestedWeights
    from dynamo.models.checkpoint.weights import ModelWeights

log = logging.getLogger(__name__)


class NativeRunner(WeightsRunner):
    """Runs one model on the NumPy backend. `open_weights` is called on the runner's thread.
    `memory_bytes` 0: all that is available. `shared_weights`: those of other workers."""

    can_sleep = True

    def __init__(
        self,
        open_weights: Callable[[], ModelWeights],
        settings: EngineSettings,
        *,
        context_tokens: int = 0,
        memory_bytes: int = 0,
        cache: CacheSettings = NO_TIERS,
        shared_weights: SharedWeights | None = None,
    ) -> None:
        super().__init__("native", open_weights, settings, context_tokens, memory_bytes, cache)
        self._threads = settings.threads or usable_cores()
        self.shared_weights = shared_weights

    def _load_model(self) -> EngineInfo:
        from dynamo.inference.native.kv_storage import KvShape, KvStorage
        from dynamo.inference.native.numpy_backend import NumpyBackend
        from dynamo.inference.native.thread_pool import ThreadPool
        from dynamo.inference.native.weights_digest import DigestedWeights

        weights = DigestedWeights(self._open_weights())
        with weights:
            config = weights.config
            shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
            ranks = self._settings.data_parallel_size
            info = plan_engine_info(
                self._settings,
                config,
                shape,
                self._context_tokens,
                memory_above_host(self._cache, ranks, self._memory_bytes),
                self._cache.max_cache_size // ranks,
            )
            block_bytes = shape.token_bytes * info.block_tokens
            host_blocks = plan_host_blocks(
                self._cache, ranks, info.num_blocks, block_bytes, self._memory_bytes
            )
            self._kv_storage = KvStorage(
                shape,
                max_num_seqs=info.max_num_seqs,
                context_tokens=info.context_tokens,
                num_blocks=info.num_blocks,
                block_tokens=info.block_tokens,
                host_blocks=host_blocks,
            )
            self._backend = NumpyBackend(
                config,
                weights.rotary(info.context_tokens),
                self._kv_storage,
                ThreadPool(self._threads),
            )
            self._digest = digest = self._open_model(weights)
        self._rotary_tokens = info.context_tokens
        self.region = self._kv_storage.region
        if self.region is not None:
            self.region.kv_layout = shape.layout(digest, info.block_tokens)
        self.layout = f"native-1 f32 {info.block_tokens} {digest}"
        self.block_shape = BlockShape(info.block_tokens, config.head_dim)
        log.info("weights opened", extra={"fields": {"cpu_s": round(time.process_time(), 2)}})
        return info

    def _open_model(self, weights: DigestedWeights) -> str:
        """Read the weights, or map those of another worker. Returns their digest."""
        from dynamo.inference.native.decoder import DecoderModel

        prepared, digest = None, ""
        try:
            if self.shared_weights is not None:
                prepared, digest = self.shared_weights.load(weights, self._backend)
            self._model = DecoderModel(weights, self._backend, prepared)
        except MemoryError as error:
            raise ModelUnavailable(f"the weights do not fit into memory: {error}") from error
        return digest or weights.digest

    async def start(self) -> EngineInfo:
        info = await super().start()
        self._offer_weights()
        return info

    async def sleep(self, level: int) -> None:
        await self._withdraw_weights()
        await self._run(self._sleep, level)

    async def wake_up(self) -> None:
        await self._run(self._wake_up)
        self._offer_weights()

    async def stop(self) -> None:
        await self._withdraw_weights()
        await super().stop()

    async def _withdraw_weights(self) -> None:
        if self.shared_weights is not None and self.shared_weights.peers is not None:
            await self.shared_weights.peers.withdraw()

    def _offer_weights(self) -> None:
        if self.shared_weights is not None and self.shared_weights.peers is not None:
            self.shared_weights.peers.start_offer()

    def _sleep(self, level: int) -> None:
        """Give memory back. Private weights stay where they are at level 1."""
        from dynamo.inference.native.buffers import Arena
        from dynamo.models.tokenization.tokenizer import trim_heap

        self._kv_storage.discard()
        self._backend.release_memory()
        if level > 1:
            del self._model
            self._backend.arena = Arena()
        if self.shared_weights is not None:
            self.shared_weights.leave(comes_back=level == 1)
        trim_heap()

    def _wake_up(self) -> None:
        from dynamo.inference.native.weights_digest import DigestedWeights

        if hasattr(self, "_model"):
            return
        weights = DigestedWeights(self._open_weights())
        with weights:
            weights.rotary(self._rotary_tokens)  # a part of the digest
            if self._open_model(weights) != self._digest:
                raise ModelUnavailable(
                    "the weights have changed since the worker started",
                    hint="the worker starts again with the new ones",
                )

    def _compute_step(self, plan: StepPlan) -> StepResult:
        import numpy as np

        from dynamo.inference.native.sampling import sample

        if plan.released and self.shared_weights is not None:
            self.shared_weights.start_huge_pages()
        for sequence in plan.released:
            if sequence.runner_state is not None:
                self._kv_storage.free_slot(sequence.runner_state)
                sequence.runner_state = None
        chunks = [self._prepare_chunk(chunk) for chunk in plan.chunks]
        with np.errstate(over="ignore"):
            batch = make_ragged_batch(chunks, self._threads)
            logits = self._model.forward(batch, self._prompt_reader(plan, batch))
            for chunk in plan.chunks:
                self._kv_storage.save_blocks(
                    chunk.sequence.runner_state, chunk.save_blocks, chunk.start + chunk.count
                )
            tokens, logprobs = sample(
                logits, [chunk.sequence for chunk in plan.chunks if chunk.samples]
            )
        return StepResult(tokens, logprobs)

    def _prompt_reader(self, plan: StepPlan, batch: RaggedBatch) -> Callable[[Array], None] | None:
        """Return what reads the logprobs of prompts in this step; None where none are wanted."""
        if not plan.new_tokens:
            return None
        chunks = [chunk for chunk in plan.chunks if chunk.sequence.wants_prompt_logprobs]
        if not chunks:
            return None
        from dynamo.inference.native.prompt_logprobs import read_prompt_logprobs

        first_rows = [batch.first_row(chunk.sequence.runner_state) for chunk in chunks]
        project = self._model.project
        return lambda rows: read_prompt_logprobs(chunks, first_rows, rows, project)

    def _prepare_chunk(self, chunk: StepChunk) -> SlotChunk:
        """Assign a slot to the chunk's sequence and load the KV before the chunk."""
        sequence = chunk.sequence
        if sequence.runner_state is None:
            sequence.runner_state = self._kv_storage.allocate_slot()
            self._kv_storage.load_blocks(sequence.runner_state, chunk.load_block_ids, chunk.start)
        end = chunk.start + chunk.count
        self._kv_storage.mark_used(sequence.runner_state, end)
        return SlotChunk(
            sequence.runner_state, chunk.start, sequence.tokens[chunk.start : end], chunk.samples
        )
