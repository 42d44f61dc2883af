"""The NumPy backend: OpenBLAS computes products, a thread pool splits the work.

OpenBLAS itself runs on one thread. The pool splits the products, too, so that two kinds of threads
do not compete for the cores.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np

from dynamo.inference.native.array_backend import Array, ArrayBackend
from dynamo.inference.native.attention import SlotAttention, soften
from dynamo.inference.native.blas import has_small_kernels, set_blas_threads
from dynamo.inference.native.blocked_matmul import BlockedMatrix, make_blocked_matrix, matmul
from dynamo.inference.native.buffers import Arena, Floats, ScratchBuffers
from dynamo.inference.native.gated_mlp import MlpShard, add_gated_mlp, shard_mlp
from dynamo.models.checkpoint.quantization import copy_floats, widen

if TYPE_CHECKING:
    from dynamo.inference.native.kv_storage import KvStorage
    from dynamo.inference.native.ragged import RaggedBatch
    from dynamo.inference.native.thread_pool import ThreadPool
    from dynamo.models.checkpoint.decoder_config import DecoderConfig, Rotary
    from dynamo.models.checkpoint.quantization import Stored

MIN_ROWS_PER_THREAD = 128
"""A further thread pays off from this many rows on."""


class NumpyBackend(ArrayBackend):
    """The array operations in NumPy. `kv_storage` holds the keys and values. `rotary` comes from
    `ModelWeights.rotary`. `arena` allocates prepared matrices."""

    def __init__(
        self,
        config: DecoderConfig,
        rotary: Rotary,
        kv_storage: KvStorage,
        thread_pool: ThreadPool,
    ) -> None:
        self.arena = Arena()
        self._scratch = ScratchBuffers()
        self.thread_pool = thread_pool
        set_blas_threads(1)
        self.small_kernels = has_small_kernels()
        self._attention = SlotAttention(config, rotary, kv_storage, thread_pool, self._scratch)
        self._batch: RaggedBatch

    def load(self, values: Stored) -> Floats:
        return copy_floats(values)

    def prepare_matrix(self, *parts: Stored, bias: Floats | None = None) -> BlockedMatrix:
        floats, threads = tuple(map(widen, parts)), self.thread_pool.threads
        return make_blocked_matrix(floats, threads, self.small_kernels, self.arena, bias)

    def prepare_vector(self, values: Floats) -> Array:
        return values

    def begin_step(self, batch: RaggedBatch) -> None:
        self._batch = batch
        self._attention.begin_step(batch)

    def embed(self, head: Array, scale: float) -> Array:
        rows = np.ascontiguousarray(head.columns(self._batch.token_ids))
        if scale != 1.0:
            rows *= np.float32(scale)
        return rows

    def rms_norm(self, rows: Array, eps: float) -> Array:
        normal = self._scratch("normal", *rows.shape)
        if len(rows) == 1:
            row = rows[0]
            mean = float(np.dot(row, row)) / len(row)
            np.multiply(rows, 1.0 / math.sqrt(mean + eps), out=normal)
            return normal

        def normalize(low: int, high: int) -> None:
            part = rows[low:high]
            means = np.vecdot(part, part)
            means /= part.shape[1]
            means += eps
            np.sqrt(means, out=means)
            np.divide(part, means[:, None], out=normal[low:high])

        self.thread_pool.split_rows(len(rows), MIN_ROWS_PER_THREAD, normalize)
        return normal

    def prepare_gated_mlp(
        self, gate: Stored, up: Stored, down: Stored, activation: str = "silu"
    ) -> tuple[MlpShard, ...]:
        gate, up, down = map(widen, (gate, up, down))
        threads = self.thread_pool.threads
        return shard_mlp(gate, up, down, activation, threads, self.small_kernels, self.arena)

    def linear(self, rows: Array, weight: Array, name: str) -> Array:
        out = self._scratch(name, len(rows), weight.padded_width)
        matmul(rows, weight, out, self.thread_pool)
        return out[:, : weight.width]

    def add_linear(self, total: Array, rows: Array, weight: Array) -> None:
        total += self.linear(rows, weight, "sum0")

    def add_gated_mlp(self, total: Array, rows: Array, weights: Array) -> None:
        add_gated_mlp(total, rows, weights, self._scratch, self.thread_pool)

    def attend(self, qkv: Array, layer: int, qk_norm: Array | None = None) -> Array:
        return self._attention(qkv, layer, qk_norm)

    def zeros(self, name: str, rows: int, width: int) -> Array:
        out = self._scratch(name, rows, width)
        out.fill(0.0)
        return out

    def soften(self, rows: Array, cap: float) -> None:
        soften(rows, cap)

    def select_sampled_rows(self, rows: Array) -> Array:
        return rows[self._batch.sampled_rows]

    def scale(self, rows: Array, factors: Array) -> None:
        rows *= factors

    def to_logits(self, rows: Array) -> Floats:
        return cast("Floats", rows)

    def release_memory(self) -> None:
        """Release the buffers of steps, which the next step allocates again."""
        self._scratch.clear()

    def stop(self) -> None:
        self.thread_pool.stop()
        self.release_memory()
