"""Attention over KV blocks in place, layer by layer.

    blocks  [block][layer][key, value][kv head][token][head_dim]

Keys lie there rotated, in the order of NumPy's runner, so that both can read each other's blocks.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from dynamo.inference.native.attention import rotaries_of_layers

if TYPE_CHECKING:
    from dynamo.inference.torch.batch import PagedBatch
    from dynamo.models.checkpoint.decoder_config import DecoderConfig, Rotary


class BlockAttention:
    """The attention of one model on the blocks `kv_blocks`, which its owner sets. `uses_kernels`:
    Triton computes it."""

    kv_blocks: torch.Tensor

    def __init__(self, config: DecoderConfig, rotary: Rotary, device: torch.device) -> None:
        self.uses_kernels = device.type == "cuda" and find_spec("triton") is not None
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._norms_each_head, self._norm_eps = config.qk_norm == "head", config.norm_eps
        self._softcap = config.attention_softcap
        self._windows = [config.window(layer) for layer in range(config.num_layers)]
        rotaries, self._layer_rotaries = rotaries_of_layers(config, rotary)
        self._rotaries = [
            (torch.from_numpy(each.frequencies).to(device), each.factor) for each in rotaries
        ]

    def begin_step(self, batch: PagedBatch) -> None:
        """Prepare the data that all layers of a step share."""
        self._batch = batch
        positions = batch.positions[:, None].double()
        self._rotations = []
        for frequencies, factor in self._rotaries:
            angles = positions * frequencies
            cosines, sines = torch.cos(angles) * factor, torch.sin(angles) * factor
            self._rotations.append((cosines.float(), sines.float()))
        if self.uses_kernels:
            from dynamo.inference.torch import kernels

            self._kernels = kernels
            self._tiles = kernels.make_prefill_tiles(batch, self._heads // self._kv_heads)

    def __call__(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        """Return [rows, heads * head_dim] from the rows of the fused projection."""
        number = self._layer_rotaries[layer]
        rotation = self._rotations[number] if number >= 0 else None
        batch, kv_blocks, window = self._batch, self.kv_blocks[:, layer], self._windows[layer]
        if qk_norm is not None and not (self.uses_kernels and self._norms_each_head):
            qkv, qk_norm = self._normalize(qkv, qk_norm), None
        if self.uses_kernels:
            queries = self._kernels.rotate(
                qkv, kv_blocks, batch.slots, self._heads,
                rotation=rotation, factors=qk_norm, eps=self._norm_eps,
            )  # fmt: skip
            args = queries, kv_blocks, batch, self._tiles, window, self._softcap
            return self._kernels.attend(*args).flatten(1)
        queries = rotate_rows(qkv, kv_blocks, batch.slots, self._heads, rotation)
        return attend_blocks(queries, kv_blocks, batch, window, self._softcap).flatten(1)

    def _normalize(self, qkv: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Norm the queries and keys of each head, or of all heads together."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        *parts, values = heads.split((self._heads, self._kv_heads, self._kv_heads), 1)
        dims = slice(2 if self._norms_each_head else 1, None)
        normed = torch.cat(
            [
                functional.rms_norm(part.float(), part.shape[dims], eps=self._norm_eps)
                for part in parts
            ],
            1,
        )
        return torch.cat(((normed * factors).to(qkv.dtype), values), 1).flatten(1)


def rotate_rows(
    qkv: torch.Tensor,
    kv_blocks: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the queries of `qkv` [rows, (heads + 2 kv heads) * head_dim], rotated by `rotation`:
    cosines and sines, [rows, rotary_dim / 2]. Keys and values go to the `slots` of `kv_blocks`."""
    kv_heads, block_tokens, dim = kv_blocks.shape[2:]
    *_, values = parts = qkv.view(len(qkv), -1, dim).split((heads + kv_heads, kv_heads), 1)
    turned = parts[0]
    if rotation is not None:
        cosines, sines = (part[:, None] for part in rotation)
        rotary_dim = 2 * cosines.shape[2]
        even, odd = (turned[..., first:rotary_dim:2].float() for first in (0, 1))
        pairs = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), -1)
        turned = torch.cat((pairs.flatten(-2).to(qkv.dtype), turned[..., rotary_dim:]), -1)
    keys_and_values = torch.stack((turned[:, heads:], values), 1)
    kv_blocks[slots // block_tokens, :, :, slots % block_tokens] = keys_and_values
    return turned[:, :heads].contiguous()


def attend_blocks(
    queries: torch.Tensor,
    kv_blocks: torch.Tensor,
    batch: PagedBatch,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return the attention of `queries` [rows, heads, head_dim], which are scaled already, on
    `kv_blocks` [blocks, 2, kv heads, tokens, head_dim]. The reference of the kernels: it reads
    nothing beyond the length of a sequence, where blocks may have any content."""
    out = torch.empty_like(queries)
    kv_heads, block_tokens = kv_blocks.shape[2:4]
    for (low, high, length), table in zip(batch.spans, batch.tables, strict=True):
        count = high - low
        first = max(0, length - count + 1 - window) // block_tokens if window else 0
        base = first * block_tokens
        areas = kv_blocks[table[first : -(-length // block_tokens)]].float()
        keys, values = areas.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - base]
        grouped = queries[low:high].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores = grouped @ keys[:, None].transpose(-1, -2)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if count > 1 or window:
            key_positions = torch.arange(base, length, device=queries.device)
            positions = torch.arange(length - count, length, device=queries.device)[:, None]
            hidden = key_positions > positions
            if window:
                hidden |= key_positions <= positions - window
            scores = scores.masked_fill(hidden, -torch.inf)
        attended = torch.softmax(scores, -1) @ values[:, None]
        out[low:high] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
    return out
