"""Attention over contiguous areas: many decoding sequences at once, prompts tile by tile.

The queries that share a key/value head are folded into the query's length.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dynamo.inference.native.crew import Crew
    from dynamo.inference.native.ragged import Ragged, Run, Span
    from dynamo.inference.native.scratch import Scratch
    from dynamo.inference.native.slots import Slots
    from dynamo.models.llama_config import LlamaConfig

Floats = np.ndarray[Any, np.dtype[np.float32]]

QUERY_TILE = 64
"""Positions of a prompt at once: what a tile must not see is not computed, but for its own half."""
SPLIT_KEYS = 384
"""A thread is worth its hand-over when a prompt's tiles meet so many keys in all."""


class Attention:
    """One model's attention on one set of areas. One layer at a time."""

    def __init__(
        self,
        config: LlamaConfig,
        rope_divisors: Floats,
        slots: Slots,
        crew: Crew,
        scratch: Scratch,
    ) -> None:
        self._kv_heads, self._dim = config.num_kv_heads, config.head_dim
        self._group = config.num_heads // config.num_kv_heads
        self._rotating = config.num_heads + config.num_kv_heads
        self._areas = slots.areas
        self._crew = crew
        self._scratch = scratch
        half = config.head_dim // 2
        exponents = np.arange(half, dtype=np.float64) / half
        self._frequencies = 1.0 / (config.rope_theta**exponents * rope_divisors)
        ones = np.ones((QUERY_TILE, QUERY_TILE), np.float32)
        self._later: Floats = np.triu(ones * -np.inf, 1)[:, None]
        self._batch: Ragged
        self._alone = (0, 0)
        self._turns: np.ndarray[Any, np.dtype[np.complex64]]
        self._padding: dict[int, Floats] = {}

    def begin(self, batch: Ragged) -> None:
        """Prepare what all layers of a step share."""
        self._batch = batch
        if len(batch.slots) == 1:
            self._alone = int(batch.slots[0]), int(batch.positions[0])
        angles = batch.positions[:, None] * self._frequencies
        self._turns = np.exp(1j * angles).astype(np.complex64)[:, None]
        self._padding = {
            run.low: self._pads(run)
            for part in batch.parts
            for run in part
            if run.high - run.low > 1
        }

    def __call__(self, qkv: Floats, layer: int) -> Floats:
        """[rows, heads * head_dim] from the fused projection's rows, which are changed."""
        rows, dim = len(qkv), self._dim
        heads = qkv.reshape(rows, -1, dim)
        turning = heads[:, : self._rotating].view(np.complex64)
        np.multiply(turning, self._turns, out=turning)
        queries = self._kv_heads * self._group
        pairs = heads[:, queries:].reshape(rows, 2, self._kv_heads, dim)
        out = self._scratch("attended", rows, queries * dim)
        batch = self._batch
        decoding = len(batch.slots)
        if decoding == 1:  # plain indices are faster than arrays of one
            self._areas[self._alone[0], layer, :, :, self._alone[1]] = pairs[0]
        elif decoding:
            positions = batch.positions[:decoding]
            self._areas[batch.slots, layer, :, :, positions] = pairs[:decoding]
        if decoding:
            self._decode(heads, out, layer)
        for span in batch.spans:
            self._prefill(span, heads, pairs, out, layer)
        return out

    def _decode(self, heads: Floats, out: Floats, layer: int) -> None:
        jobs = [
            partial(self._decode_part, part, f"scores{index}", heads, out, layer)
            for index, part in enumerate(self._batch.parts)
        ]
        if len(jobs) > 1:
            self._crew.each(jobs)
        else:
            jobs[0]()

    def _decode_part(
        self, part: tuple[Run, ...], name: str, heads: Floats, out: Floats, layer: int
    ) -> None:
        kv_heads, group, dim = self._kv_heads, self._group, self._dim
        for run in part:
            count, length = run.high - run.low, run.length
            area = self._areas[run.slot : run.slot + count, layer, :, :, :length]
            queries = heads[run.low : run.high, : kv_heads * group]
            queries = queries.reshape(count, kv_heads, group, dim)
            scores = self._scratch(name, count, kv_heads, group, length)
            np.matmul(queries, area[:, 0].swapaxes(-1, -2), out=scores)
            if count > 1:
                scores += self._padding[run.low]
            sums = _exponentials(scores)
            mixed = out[run.low : run.high].reshape(count, kv_heads, group, dim)
            np.matmul(scores, area[:, 1], out=mixed)
            mixed /= sums

    def _pads(self, run: Run) -> Floats:
        """[rows, 1, 1, length]: minus infinity where a row's sequence has no position."""
        lengths = self._batch.positions[run.low : run.high] + 1
        beyond = np.arange(run.length) >= lengths[:, None]
        return np.where(beyond, np.float32(-np.inf), np.float32(0.0))[:, None, None]

    def _prefill(self, span: Span, heads: Floats, pairs: Floats, out: Floats, layer: int) -> None:
        kv_heads, group, dim = self._kv_heads, self._group, self._dim
        count, start = span.high - span.low, span.start
        area = self._areas[span.slot, layer]
        area[:, :, start : start + count] = pairs[span.low : span.high].transpose(1, 2, 0, 3)
        asked = heads[span.low : span.high, : kv_heads * group]
        queries = self._scratch("queries", kv_heads, count, group, dim)
        queries[:] = asked.reshape(count, kv_heads, group, dim).swapaxes(0, 1)
        mixed = out[span.low : span.high].reshape(count, kv_heads, group, dim)
        tiles = [(head, low) for low in range(0, count, QUERY_TILE) for head in range(kv_heads)][
            ::-1
        ]
        threads = min(self._crew.threads, len(tiles) * (start + count) // SPLIT_KEYS + 1)
        self._crew.each(
            [
                partial(
                    self._tiles, tiles[part::threads], f"scores{part}", queries, area, mixed, start
                )
                for part in range(threads)
            ]
        )

    def _tiles(
        self,
        tiles: list[tuple[int, int]],
        name: str,
        queries: Floats,
        area: Floats,
        mixed: Floats,
        start: int,
    ) -> None:
        """Attention of (kv head, first position) tiles into `mixed`."""
        _, count, group, dim = queries.shape
        for head, low in tiles:
            high = min(count, low + QUERY_TILE)
            length, rows = start + high, (high - low) * group
            scores = self._scratch(name, rows, length)
            np.dot(queries[head, low:high].reshape(rows, dim), area[0, head, :length].T, out=scores)
            own = scores.reshape(high - low, group, length)[..., start + low :]
            own += self._later[: high - low, :, : high - low]
            sums = _exponentials(scores)
            weighted = np.dot(scores, area[1, head, :length])
            weighted /= sums
            mixed[low:high, head] = weighted.reshape(high - low, group, dim)


def _exponentials(scores: Floats) -> Floats:
    """Turn scores into unnormalised weights in place; the rows' sums."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: Floats = np.add.reduce(scores, axis=-1, keepdims=True)
    return sums
