"""Attention over contiguous areas: many decoding sequences at once, prompts tile by tile.

The queries that share a key/value head are folded into the query's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo.models.checkpoint.decoder_config import Rotary, plain_frequencies

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Floats, ScratchBuffers
    from dynamo.inference.native.kv_storage import KvStorage
    from dynamo.inference.native.ragged import DecodeRun, PrefillSpan, RaggedBatch
    from dynamo.inference.native.thread_pool import ThreadPool
    from dynamo.models.checkpoint.decoder_config import DecoderConfig

QUERY_TILE = 64
"""Prompt positions in one tile. Masked scores are computed only inside a tile's own square."""
MIN_KEYS_PER_THREAD = 384
"""A further thread pays off if the tiles of a prompt read this many keys in total."""


class SlotAttention:
    """The attention of one model on one set of areas, called layer by layer."""

    def __init__(
        self,
        config: DecoderConfig,
        rotary: Rotary,
        kv_storage: KvStorage,
        thread_pool: ThreadPool,
        scratch: ScratchBuffers,
    ) -> None:
        self._kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._queries_per_kv_head = config.num_heads // config.num_kv_heads
        self._rotary_heads = config.num_heads + config.num_kv_heads
        self._rotary_dim = config.rotary_dim or config.head_dim
        self._norms_each_head, self._norm_eps = config.qk_norm == "head", config.norm_eps
        self._softcap = config.attention_softcap
        self._windows = [config.window(layer) for layer in range(config.num_layers)]
        self._rotaries, self._layer_rotaries = rotaries_of_layers(config, rotary)
        self._areas = kv_storage.areas
        self._thread_pool = thread_pool
        self._scratch = scratch
        ones = np.ones((QUERY_TILE, QUERY_TILE), np.float32)
        self._causal_mask: Floats = np.triu(ones * -np.inf, 1)[:, None]
        self._window_mask: Floats = np.tril(ones * -np.inf, -1)[:, None]
        self._batch: RaggedBatch
        self._single_position = (0, 0)
        self._rotations: list[np.ndarray[Any, np.dtype[np.complex64]]] = []
        self._masks: dict[tuple[int, int], Floats] = {}

    def begin_step(self, batch: RaggedBatch) -> None:
        """Prepare the data that all layers of a step share."""
        self._batch = batch
        if len(batch.decode_slots) == 1:
            self._single_position = int(batch.decode_slots[0]), int(batch.positions[0])
        positions = batch.positions[:, None]
        self._rotations = [
            (np.exp(1j * (positions * rotary.frequencies)) * rotary.factor).astype(np.complex64)[
                :, None
            ]
            for rotary in self._rotaries
        ]
        self._masks = {
            (run.low, window): self._mask(run, window)
            for window in set(self._windows)
            for part in batch.decode_parts
            for run in part
            if run.high - run.low > 1
        }

    def __call__(self, qkv: Floats, layer: int, qk_norm: Floats | None) -> Floats:
        """Return [rows, heads * head_dim] from the rows of the fused projection. `qkv` is
        changed."""
        rows, dim = len(qkv), self._head_dim
        heads = qkv.reshape(rows, -1, dim)
        if qk_norm is not None:
            self._normalize(heads, qk_norm)
        number = self._layer_rotaries[layer]
        if number >= 0:
            rotated = heads[:, : self._rotary_heads, : self._rotary_dim].view(np.complex64)
            np.multiply(rotated, self._rotations[number], out=rotated)
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
        window = self._windows[layer]
        for run in part:
            count, first = run.high - run.low, self._first_position(run, window)
            length = run.length - first
            area = self._areas[run.slot : run.slot + count, layer, :, :, first : run.length]
            queries = heads[run.low : run.high, : kv_heads * group]
            queries = queries.reshape(count, kv_heads, group, dim)
            scores = self._scratch(name, count, kv_heads, group, length)
            np.matmul(queries, area[:, 0].swapaxes(-1, -2), out=scores)
            if self._softcap:
                soften(scores, self._softcap)
            if count > 1:
                scores += self._masks[run.low, window]
            sums = _exponentiate_scores(scores)
            mixed = out[run.low : run.high].reshape(count, kv_heads, group, dim)
            np.matmul(scores, area[:, 1], out=mixed)
            mixed /= sums

    def _first_position(self, run: DecodeRun, window: int) -> int:
        """Return the first position that a row of the run attends to."""
        if not window or run.length <= window:
            return 0
        return max(0, int(self._batch.positions[run.low : run.high].min()) + 1 - window)

    def _mask(self, run: DecodeRun, window: int) -> Floats:
        """Return [rows, 1, 1, positions]: minus infinity at positions beyond a row's sequence, and
        before its window. The first column is `_first_position`."""
        ends = self._batch.positions[run.low : run.high, None] + 1
        positions = np.arange(self._first_position(run, window), run.length)
        hidden = positions >= ends
        if window:
            hidden |= positions < ends - window
        return np.where(hidden, np.float32(-np.inf), np.float32(0.0))[:, None, None]

    def _normalize(self, heads: Floats, factors: Floats) -> None:
        """Norm the queries and keys of each head, or of all heads together, in place."""
        if self._norms_each_head:
            parts = [heads[:, : self._rotary_heads]]
        else:
            queries = self._kv_heads * self._queries_per_kv_head
            parts = [heads[:, :queries], heads[:, queries : self._rotary_heads]]
        axis = -1 if self._norms_each_head else (-2, -1)
        for part in parts:
            means = np.mean(np.square(part), axis=axis, keepdims=True)
            np.divide(part, np.sqrt(means + np.float32(self._norm_eps)), out=part)
        heads[:, : self._rotary_heads] *= factors

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
        data = queries, area, mixed, start, self._windows[layer]
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
        window: int,
    ) -> None:
        """Write the attention of the tiles (kv head, first position) into `mixed`."""
        _, count, group, dim = queries.shape
        for head, low in tiles:
            high = min(count, low + QUERY_TILE)
            excluded = start + low + 1 - window if window else 0  # by the window of the first row
            first, end = max(0, excluded), start + high
            rows, length = (high - low) * group, end - first
            scores = self._scratch(name, rows, length)
            tile = queries[head, low:high].reshape(rows, dim)
            np.dot(tile, area[0, head, first:end].T, out=scores)
            if self._softcap:
                soften(scores, self._softcap)
            by_row = scores.reshape(high - low, group, length)
            masked = by_row[..., start + low - first :]
            masked += self._causal_mask[: high - low, :, : high - low]
            if window and end > window:
                skip = max(0, -excluded)
                columns = min(length, QUERY_TILE)
                by_row[skip:, :, :columns] += self._window_mask[: high - low - skip, :, :columns]
            sums = _exponentiate_scores(scores)
            weighted = np.dot(scores, area[1, head, first:end])
            weighted /= sums
            mixed[low:high, head] = weighted.reshape(high - low, group, dim)


def rotaries_of_layers(
    config: DecoderConfig, rotary: Rotary
) -> tuple[Sequence[Rotary], Sequence[int]]:
    """Return the rotary embeddings, and for each layer the number of its own; -1: none."""
    rotaries = [rotary]
    if config.local_rope_theta:
        rotaries.append(Rotary(plain_frequencies(config, config.local_rope_theta)))
    last = len(rotaries) - 1
    numbers = [last if config.window(layer) else 0 for layer in range(config.num_layers)]
    for layer in config.unrotated:
        numbers[layer] = -1
    return rotaries, numbers


def soften(values: Floats, cap: float) -> None:
    """Replace each x in place by cap * tanh(x / cap)."""
    values *= np.float32(1.0 / cap)
    np.tanh(values, out=values)
    values *= np.float32(cap)


def _exponentiate_scores(scores: Floats) -> Floats:
    """Turn scores into unnormalised weights in place and return the sums of the rows."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    sums: Floats = np.add.reduce(scores, axis=-1, keepdims=True)
    return sums
