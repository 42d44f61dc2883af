"""Attention over contiguous areas: many decoding sequences at once, prompts tile by tile.

The queries that share a key/value head are folded into the query's length.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Floats, ScratchBuffers
    from dynamo.inference.native.kv_storage import KvStorage
    from dynamo.inference.native.ragged import DecodeRun, PrefillSpan, RaggedBatch
    from dynamo.inference.native.thread_pool import ThreadPool
    from dynamo.models.checkpoint.llama_config import LlamaConfig

QUERY_TILE = 64
"""Prompt positions in one tile. Masked scores are computed only inside a tile's own square."""
MIN_KEYS_PER_THREAD = 384
"""A further thread pays off if the tiles of a prompt read this many keys in total."""


class SlotAttention:
    """The attention of one model on one set of areas, called layer by layer."""

    def __init__(
        self,
        config: LlamaConfig,
        rope_divisors: Floats,
        kv_storage: KvStorage,
        thread_pool: ThreadPool,
        scratch: ScratchBuffers,
    ) -> None:
        self._kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._queries_per_kv_head = config.num_heads // config.num_kv_heads
        self._rotary_heads = config.num_heads + config.num_kv_heads
        self._areas = kv_storage.areas
        self._thread_pool = thread_pool
        self._scratch = scratch
        half = config.head_dim // 2
        exponents = np.arange(half, dtype=np.float64) / half
        self._frequencies = 1.0 / (config.rope_theta**exponents * rope_divisors)
        ones = np.ones((QUERY_TILE, QUERY_TILE), np.float32)
        self._causal_mask: Floats = np.triu(ones * -np.inf, 1)[:, None]
        self._batch: RaggedBatch
        self._single_position = (0, 0)
        self._rotations: np.ndarray[Any, np.dtype[np.complex64]]
        self._padding_masks: dict[int, Floats] = {}

    def begin_step(self, batch: RaggedBatch) -> None:
        """Prepare the data that all layers of a step share."""
        self._batch = batch
        if len(batch.decode_slots) == 1:
            self._single_position = int(batch.decode_slots[0]), int(batch.positions[0])
        angles = batch.positions[:, None] * self._frequencies
        self._rotations = np.exp(1j * angles).astype(np.complex64)[:, None]
        self._padding_masks = {
            run.low: self._padding_mask(run)
            for part in batch.decode_parts
            for run in part
            if run.high - run.low > 1
        }

    def __call__(self, qkv: Floats, layer: int) -> Floats:
        """Return [rows, heads * head_dim] from the rows of the fused projection. `qkv` is
        changed."""
        rows, dim = len(qkv), self._head_dim
        heads = qkv.reshape(rows, -1, dim)
        rotated = heads[:, : self._rotary_heads].view(np.complex64)
        np.multiply(rotated, self._rotations, out=rotated)
        queries = self._kv_heads * self._queries_per_kv_head
        pairs = heads[:, queries:].reshape(rows, 2, self._kv_heads, dim)
        out = self._scratch("attended", rows, queries * dim)
        batch = self._batch
        decoding = len(batch.decode_slots)
        if decoding == 1:  # scalar indices are faster than index arrays
            self._areas[self._single_position[0], layer, :, :, self._single_position[1]] = pairs[0]
        elif decoding:
            positions = batch.positions[:decoding]
            self._areas[batch.decode_slots, layer, :, :, positions] = pairs[:decoding]
        if decoding:
            self._decode(heads, out, layer)
        for span in batch.prefill_spans:
            self._prefill(span, heads, pairs, out, layer)
        return out

    def _decode(self, heads: Floats, out: Floats, layer: int) -> None:
        jobs = [
            partial(self._decode_part, part, f"scores{index}", heads, out, layer)
            for index, part in enumerate(self._batch.decode_parts)
        ]
        if len(jobs) > 1:
            self._thread_pool.run_jobs(jobs)
        else:
            jobs[0]()

    def _decode_part(
        self, part: tuple[DecodeRun, ...], name: str, heads: Floats, out: Floats, layer: int
    ) -> None:
        kv_heads, group, dim = self._kv_heads, self._queries_per_kv_head, self._head_dim
        for run in part:
            count, length = run.high - run.low, run.length
            area = self._areas[run.slot : run.slot + count, layer, :, :, :length]
            queries = heads[run.low : run.high, : kv_heads * group]
            queries = queries.reshape(count, kv_heads, group, dim)
            scores = self._scratch(name, count, kv_heads, group, length)
            np.matmul(queries, area[:, 0].swapaxes(-1, -2), out=scores)
            if count > 1:
                scores += self._padding_masks[run.low]
            sums = _exponentiate_scores(scores)
            mixed = out[run.low : run.high].reshape(count, kv_heads, group, dim)
            np.matmul(scores, area[:, 1], out=mixed)
            mixed /= sums

    def _padding_mask(self, run: DecodeRun) -> Floats:
        """Return [rows, 1, 1, length]: minus infinity at positions beyond a row's sequence."""
        lengths = self._batch.positions[run.low : run.high] + 1
        beyond = np.arange(run.length) >= lengths[:, None]
        return np.where(beyond, np.float32(-np.inf), np.float32(0.0))[:, None, None]

    def _prefill(
        self, span: PrefillSpan, heads: Floats, pairs: Floats, out: Floats, layer: int
    ) -> None:
        kv_heads, group, dim = self._kv_heads, self._queries_per_kv_head, self._head_dim
        count, start = span.high - span.low, span.start
        area = self._areas[span.slot, layer]
        area[:, :, start : start + count] = pairs[span.low : span.high].transpose(1, 2, 0, 3)
        span_queries = heads[span.low : span.high, : kv_heads * group]
        queries = self._scratch("queries", kv_heads, count, group, dim)
        queries[:] = span_queries.reshape(count, kv_heads, group, dim).swapaxes(0, 1)
        mixed = out[span.low : span.high].reshape(count, kv_heads, group, dim)
        lows = range(0, count, QUERY_TILE)
        tiles = [(head, low) for low in lows for head in range(kv_heads)][::-1]
        useful_threads = len(tiles) * (start + count) // MIN_KEYS_PER_THREAD + 1
        threads = min(self._thread_pool.threads, useful_threads)
        data = queries, area, mixed, start
        self._thread_pool.run_jobs(
            [
                partial(self._prefill_tiles, tiles[part::threads], f"scores{part}", *data)
                for part in range(threads)
            ]
        )

    def _prefill_tiles(
        self,
        tiles: list[tuple[int, int]],
        name: str,
        queries: Floats,
        area: Floats,
        mixed: Floats,
        start: int,
    ) -> None:
        """Write the attention of the tiles (kv head, first position) into `mixed`."""
        _, count, group, dim = queries.shape
        for head, low in tiles:
            high = min(count, low + QUERY_TILE)
            length, rows = start + high, (high - low) * group
            scores = self._scratch(name, rows, length)
            np.dot(queries[head, low:high].reshape(rows, dim), area[0, head, :length].T, out=scores)
            masked = scores.reshape(high - low, group, length)[..., start + low :]
            masked += self._causal_mask[: high - low, :, : high - low]
            sums = _exponentiate_scores(scores)
            weighted = np.dot(scores, area[1, head, :length])
            weighted /= sums
            mixed[low:high, head] = weighted.reshape(high - low, group, dim)


def _exponentiate_scores(scores: Floats) -> Floats:
    """Turn scores into unnormalised weights in place and return the sums of the rows."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: Floats = np.add.reduce(scores, axis=-1, keepdims=True)
    return sums
