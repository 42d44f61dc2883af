"""Computes in a thread of its own, so that the event loop stays free, and posts whole steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as Listed
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dynamo.core.errors import ModelUnavailable
from dynamo.core.settings.schema_engine import Engine as EngineSettings
from dynamo.core.values import EngineInfo
from dynamo.inference.native.ragged import Work, lay_out
from dynamo.inference.native.sizes import cores, plan_sizes
from dynamo.inference.runner import Chunk, Runner, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.inference.sequence import Sequence
    from dynamo.models.weights import Weights

log = logging.getLogger(__name__)


class NativeRunner(Runner):
    """One model on the NumPy backend. `open_weights` is called in the runner's thread."""

    def __init__(
        self,
        open_weights: Callable[[], Weights],
        settings: EngineSettings,
        *,
        context_tokens: int = 0,
    ) -> None:
        self._open_weights = open_weights
        self._settings = settings
        self._context_tokens = context_tokens
        self._threads = settings.threads or cores()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="native")

    async def start(self) -> EngineInfo:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._load)

    async def step(self, plan: StepPlan) -> StepResult:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._compute, plan)

    async def stop(self) -> None:
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        if hasattr(self, "_arrays"):
            self._arrays.stop()

    def _load(self) -> EngineInfo:
        from dynamo.inference.native.crew import Crew
        from dynamo.inference.native.llama import Llama
        from dynamo.inference.native.numpy_arrays import NumpyArrays
        from dynamo.inference.native.slots import KvShape, Slots

        with self._open_weights() as weights:
            config = weights.config
            shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
            info = plan_sizes(self._settings, config, shape, self._context_tokens)
            self._slots = Slots(
                shape,
                max_num_seqs=info.max_num_seqs,
                context_tokens=info.context_tokens,
                num_blocks=info.num_blocks,
                block_tokens=info.block_tokens,
            )
            self._arrays = NumpyArrays(
                config, weights.rope_divisors(), self._slots, Crew(self._threads)
            )
            try:
                self._model = Llama(weights, self._arrays)
            except MemoryError as error:
                raise ModelUnavailable(f"the weights do not fit into memory: {error}") from error
        log.info("weights opened", extra={"fields": {"cpu_s": round(time.process_time(), 2)}})
        return info

    def _compute(self, plan: StepPlan) -> StepResult:
        import numpy as np

        from dynamo.inference.native.sampling import sample

        self._release(plan.released)
        work = [self._place(chunk) for chunk in plan.chunks]
        with np.errstate(over="ignore"):
            logits = self._model.forward(lay_out(work, self._threads))
            for chunk in plan.chunks:
                self._slots.save(chunk.sequence.slot, chunk.save)
            tokens, logprobs = sample(
                logits, [chunk.sequence for chunk in plan.chunks if chunk.samples]
            )
        return StepResult(tokens, logprobs)

    def _release(self, sequences: Listed[Sequence]) -> None:
        for sequence in sequences:
            if sequence.slot is not None:
                self._slots.give_back(sequence.slot)
                sequence.slot = None

    def _place(self, chunk: Chunk) -> Work:
        """Give the chunk's sequence its area, with the KV of what comes before the chunk."""
        sequence = chunk.sequence
        if sequence.slot is None:
            sequence.slot = self._slots.take()
            self._slots.load(sequence.slot, chunk.load)
        end = chunk.start + chunk.count
        self._slots.reach(sequence.slot, end)
        return Work(sequence.slot, chunk.start, sequence.tokens[chunk.start : end], chunk.samples)
