"""The NumPy backend: OpenBLAS for products, a crew of threads.

OpenBLAS itself runs on one thread: the crew cuts the products, too, so that no threads of two
kinds compete for the cores.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo.inference.native.arrays import Array, Arrays
from dynamo.inference.native.attention import Attention
from dynamo.inference.native.blas import has_small_kernels, set_threads
from dynamo.inference.native.products import Matrix, block_matrix, multiply
from dynamo.inference.native.scratch import Scratch

if TYPE_CHECKING:
    from dynamo.inference.native.crew import Crew
    from dynamo.inference.native.ragged import Ragged
    from dynamo.inference.native.slots import Slots
    from dynamo.models.weights import LlamaConfig

Floats = np.ndarray[Any, np.dtype[np.float32]]

TILE_ROWS = 32
"""Rows of the gate at once: what the passes touch stays in the L2 cache."""
SPLIT_ROWS = 32
"""A thread is worth its hand-over from so many rows on."""


class NumpyArrays(Arrays):
    """`slots`: where the keys and values live. `rope_divisors`: see `Weights`."""

    def __init__(
        self, config: LlamaConfig, rope_divisors: Floats, slots: Slots, crew: Crew
    ) -> None:
        self._scratch = Scratch()
        self._crew = crew
        set_threads(1)
        self._small_kernels = has_small_kernels()
        self._attention = Attention(config, rope_divisors, slots, crew, self._scratch)
        self._batch: Ragged

    def matrix(self, *parts: Floats) -> Matrix:
        return block_matrix(parts, self._crew.threads, self._small_kernels)

    def vector(self, values: Floats) -> Array:
        return values

    def begin(self, batch: Ragged) -> None:
        self._batch = batch
        self._attention.begin(batch)

    def embed(self, head: Array) -> Array:
        return np.ascontiguousarray(head.columns(self._batch.ids))

    def normalise(self, rows: Array, eps: float) -> Array:
        normal = self._scratch("normal", *rows.shape)

        def work(low: int, high: int) -> None:
            part = rows[low:high]
            mean = np.einsum("ij,ij->i", part, part)
            mean *= 1.0 / part.shape[1]
            mean += eps
            np.sqrt(mean, out=mean)
            np.divide(part, mean[:, None], out=normal[low:high])

        self._crew.rows(len(rows), 4 * SPLIT_ROWS, work)
        return normal

    def linear(self, rows: Array, weight: Array, name: str) -> Array:
        out = self._scratch(name, len(rows), weight.padded)
        multiply(rows, weight, out, self._crew)
        return out[:, : weight.width]

    def add(self, rows: Array, more: Array) -> None:
        np.add(rows, more, out=rows)

    def attend(self, qkv: Array, layer: int) -> Array:
        return self._attention(qkv, layer)

    def gate(self, gate_up: Array) -> Array:
        width = gate_up.shape[1] // 2
        out = self._scratch("gated", len(gate_up), width)
        self._crew.rows(len(gate_up), SPLIT_ROWS, partial(_gate, gate_up, out))
        return out

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


def _gate(gate_up: Floats, out: Floats, low: int, high: int) -> None:
    width = out.shape[1]
    for top in range(low, high, TILE_ROWS):
        rows = slice(top, min(high, top + TILE_ROWS))
        gate, up, tile = gate_up[rows, :width], gate_up[rows, width:], out[rows]
        np.exp(gate, out=tile)
        tile += 1.0
        gate *= up
        np.divide(gate, tile, out=tile)
