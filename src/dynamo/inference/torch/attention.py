"""Attention over KV blocks in place, layer by layer.

    blocks  [block][layer][key, value][kv head][token][head_dim]

Keys lie there rotated, in the order of NumPy's runner, so that both can read each other's blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from dynamo.inference.native.attention import rotaries_of_layers

if TYPE_CHECKING:
    from dynamo.inference.torch.batch import PagedBatch
    from dynamo.models.checkpoint.decoder_config import DecoderConfig, Rotary


class BlockAttention:
    """The attention of one model on the blocks `kv_blocks`, which its owner sets."""

    kv_blocks: torch.Tensor

    def __init__(self, config: DecoderConfig, rotary: Rotary, device: torch.device) -> None:
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._rotary_dim = config.rotary_dim or config.head_dim
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
            parts = torch.cos(angles) * factor, torch.sin(angles) * factor
            self._rotations.append(torch.complex(*(part.float() for part in parts))[:, None])

    def __call__(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        """Return [rows, heads * head_dim] from the rows of the fused projection."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        rotated = self._heads + self._kv_heads
        turned = heads[:, :rotated].float()
        if qk_norm is not None:
            turned = self._normalize(turned, qk_norm)
        if (number := self._layer_rotaries[layer]) >= 0:
            turned = self._rotate(turned, self._rotations[number])
        turned = turned.to(qkv.dtype)
        batch, kv_blocks = self._batch, self.kv_blocks[:, layer]
        pairs = torch.stack((turned[:, self._heads :], heads[:, rotated:]), 1)
        block_tokens = kv_blocks.shape[3]
        kv_blocks[batch.slots // block_tokens, :, :, batch.slots % block_tokens] = pairs
        queries = turned[:, : self._heads]
        attended = attend_blocks(queries, kv_blocks, batch, self._windows[layer], self._softcap)
        return attended.flatten(1)

    def _normalize(self, heads: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Norm the queries and keys of each head, or of all heads together."""
        if self._norms_each_head:
            return functional.rms_norm(heads, heads.shape[2:], eps=self._norm_eps) * factors
        parts = heads.split((self._heads, self._kv_heads), 1)
        normed = [functional.rms_norm(part, part.shape[1:], eps=self._norm_eps) for part in parts]
        return torch.cat(normed, 1) * factors

    def _rotate(self, heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs of neighbours in each head."""
        turned = heads[..., : self._rotary_dim].contiguous().unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(turned) * rotation).flatten(-2)
        return torch.cat((turned, heads[..., self._rotary_dim :]), -1)


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
