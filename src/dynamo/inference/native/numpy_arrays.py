"""The NumPy backend: OpenBLAS for products, a crew of threads.

OpenBLAS itself runs on one thread: the crew cuts the products, too, so that no threads of two
kinds compete for the cores.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo.inference.native.arena import Arena
from dynamo.inference.native.arrays import Array, Arrays
from dynamo.inference.native.attention import Attention
from dynamo.inference.native.blas import has_small_kernels, set_threads
from dynamo.inference.native.gated import Piece, add_gated, cut
from dynamo.inference.native.products import Matrix, block_matrix, multiply
from dynamo.inference.native.scratch import Scratch

if TYPE_CHECKING:
    from dynamo.inference.native.crew import Crew
    from dynamo.inference.native.ragged import Ragged
    from dynamo.inference.native.slots import Slots
    from dynamo.models.llama_config import LlamaConfig

Floats = np.ndarray[Any, np.dtype[np.float32]]

SPLIT_ROWS = 128
"""A thread is worth its hand-over from so many rows on."""


class NumpyArrays(Arrays):
    """`slots`: where the keys and values live. `rope_divisors`: see `Weights`."""

    def __init__(
        self, config: LlamaConfig, rope_divisors: Floats, slots: Slots, crew: Crew
    ) -> None:
        self._arena = Arena()
        self._scratch = Scratch()
        self._crew = crew
        set_threads(1)
        self._small_kernels = has_small_kernels()
        self._attention = Attention(config, rope_divisors, slots, crew, self._scratch)
        self._batch: Ragged

    def matrix(self, *parts: Floats) -> Matrix:
        return block_matrix(parts, self._crew.threads, self._small_kernels, self._arena)

    def vector(self, values: Floats) -> Array:
        return values

    def begin(self, batch: Ragged) -> None:
        self._batch = batch
        self._attention.begin(batch)

    def embed(self, head: Array) -> Array:
        return np.ascontiguousarray(head.columns(self._batch.ids))

    def normalise(self, rows: Array, eps: float) -> Array:
        normal = self._scratch("normal", *rows.shape)

        if len(rows) == 1:
            row = rows[0]
            mean = float(np.dot(row, row)) / len(row)
            np.multiply(rows, 1.0 / math.sqrt(mean + eps), out=normal)
            return normal

        def work(low: int, high: int) -> None:
            part = rows[low:high]
            means = np.vecdot(part, part)
            means /= part.shape[1]
            means += eps
            np.sqrt(means, out=means)
            np.divide(part, means[:, None], out=normal[low:high])

        self._crew.rows(len(rows), SPLIT_ROWS, work)
        return normal

    def gated(self, gate: Floats, up: Floats, down: Floats) -> tuple[Piece, ...]:
        return cut(gate, up, down, self._crew.threads, self._small_kernels, self._arena)

    def linear(self, rows: Array, weight: Array, name: str) -> Array:
        out = self._scratch(name, len(rows), weight.padded)
        multiply(rows, weight, out, self._crew)
        return out[:, : weight.width]

    def add_linear(self, total: Array, rows: Array, weight: Array) -> None:
        total += self.linear(rows, weight, "sum0")

    def add_gated(self, total: Array, rows: Array, weights: Array) -> None:
        add_gated(total, rows, weights, self._scratch, self._crew)

    def attend(self, qkv: Array, layer: int) -> Array:
        return self._attention(qkv, layer)

    def sampled(self, rows: Array) -> Array:
        return rows[self._batch.samples]

    def scale(self, rows: Array, factors: Array) -> None:
        rows *= factors

    def numbers(self, rows: Array) -> Floats:
        found: Floats = rows
        return found

    def stop(self) -> None:
        self._crew.stop()
        self._scratch.clear()
