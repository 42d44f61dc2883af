"""The forward pass of Llama-shaped models over a ragged batch.

Norm factors are folded into the matrices after them, the attention scale into the queries, and
the rotary pairs of a head lie side by side, so that rotating is one complex multiplication.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.inference.native.array_backend import Array, ArrayBackend

if TYPE_CHECKING:
    import numpy as np

    from dynamo.inference.native.ragged import RaggedBatch
    from dynamo.models.checkpoint.weights import ModelWeights

    Floats = np.ndarray[Any, np.dtype[np.float32]]


class LlamaLayer(msgspec.Struct, frozen=True):
    """One transformer layer's matrices."""

    qkv: Array
    out: Array
    mlp: Array


class LlamaModel:
    """A model's weights, prepared for a backend."""

    def __init__(self, weights: ModelWeights, arrays: ArrayBackend) -> None:
        config = weights.config
        self._backend = arrays
        self._norm_eps = config.norm_eps
        embedding = weights.tensor("model.embed_tokens.weight")
        self._embedding = arrays.prepare_matrix(embedding)
        self._lm_head = (
            self._embedding
            if config.tied
            else arrays.prepare_matrix(weights.tensor("lm_head.weight"))
        )
        self._final_norm = arrays.prepare_vector(weights.tensor("model.norm.weight"))
        self._layers = [
            _prepare_layer(weights, arrays, index) for index in range(config.num_layers)
        ]

    def forward(self, batch: RaggedBatch) -> Floats:
        """Logits of the rows that sample: [samples, vocabulary], valid until the next call."""
        arrays, eps = self._backend, self._norm_eps
        arrays.begin_step(batch)
        rows = arrays.embed(self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = arrays.linear(arrays.rms_norm(rows, eps), layer.qkv, "qkv")
            arrays.add_linear(rows, arrays.attend(qkv, index), layer.out)
            arrays.add_gated_mlp(rows, arrays.rms_norm(rows, eps), layer.mlp)
        if not len(batch.sampled_rows):
            return arrays.to_numpy(rows[:0])
        last = arrays.rms_norm(arrays.select_sampled_rows(rows), eps)
        arrays.scale(last, self._final_norm)
        return arrays.to_numpy(arrays.linear(last, self._lm_head, "logits"))


def _prepare_layer(weights: ModelWeights, arrays: ArrayBackend, index: int) -> LlamaLayer:
    import numpy as np

    config = weights.config
    name = f"model.layers.{index}."

    def tensor(part: str) -> Floats:
        return weights.tensor(f"{name}{part}.weight")

    query = interleave_rotary_pairs(tensor("self_attn.q_proj"), config.num_heads)
    query *= 1.0 / math.sqrt(config.head_dim)
    key = interleave_rotary_pairs(tensor("self_attn.k_proj"), config.num_kv_heads)
    value = tensor("self_attn.v_proj")
    before = tensor("input_layernorm")
    after = tensor("post_attention_layernorm")
    for projection in (query, key, value):
        np.multiply(projection, before, out=projection)
    gate, up = tensor("mlp.gate_proj"), tensor("mlp.up_proj")
    for projection in (gate, up):
        np.multiply(projection, after, out=projection)
    return LlamaLayer(
        qkv=arrays.prepare_matrix(query, key, value),
        out=arrays.prepare_matrix(tensor("self_attn.o_proj")),
        mlp=arrays.prepare_gated_mlp(gate, up, tensor("mlp.down_proj")),
    )


def interleave_rotary_pairs(projection: Floats, heads: int) -> Floats:
    """Rows in rotate_half order (halves) reordered so that a rotary pair's rows are neighbours."""
    import numpy as np

    rows, width = projection.shape
    halves = projection.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)
