"""The forward pass of Llama-shaped models over a ragged batch.

Norm factors are folded into the matrices after them, the attention scale into the queries, and
the rotary pairs of a head lie side by side, so that rotating is one complex multiplication.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.inference.native.arrays import Array, Arrays

if TYPE_CHECKING:
    import numpy as np

    from dynamo.inference.native.ragged import Ragged
    from dynamo.models.weights import Weights

    Floats = np.ndarray[Any, np.dtype[np.float32]]


class Layer(msgspec.Struct, frozen=True):
    """One transformer layer's matrices."""

    qkv: Array
    out: Array
    mlp: Array


class Llama:
    """A model's weights, prepared for a backend."""

    def __init__(self, weights: Weights, arrays: Arrays) -> None:
        config = weights.config
        self._arrays = arrays
        self._eps = config.norm_eps
        embedding = weights.tensor("model.embed_tokens.weight")
        self._embedding = arrays.matrix(embedding)
        self._head = (
            self._embedding if config.tied else arrays.matrix(weights.tensor("lm_head.weight"))
        )
        self._final = arrays.vector(weights.tensor("model.norm.weight"))
        self._layers = [_layer(weights, arrays, index) for index in range(config.num_layers)]

    def forward(self, batch: Ragged) -> Floats:
        """Logits of the rows that sample: [samples, vocabulary], valid until the next call."""
        arrays, eps = self._arrays, self._eps
        arrays.begin(batch)
        rows = arrays.embed(self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = arrays.linear(arrays.normalise(rows, eps), layer.qkv, "qkv")
            arrays.add_linear(rows, arrays.attend(qkv, index), layer.out)
            arrays.add_gated(rows, arrays.normalise(rows, eps), layer.mlp)
        if not len(batch.samples):
            return arrays.numbers(rows[:0])
        last = arrays.normalise(arrays.sampled(rows), eps)
        arrays.scale(last, self._final)
        return arrays.numbers(arrays.linear(last, self._head, "logits"))


def _layer(weights: Weights, arrays: Arrays, index: int) -> Layer:
    import numpy as np

    config = weights.config
    name = f"model.layers.{index}."

    def tensor(part: str) -> Floats:
        return weights.tensor(f"{name}{part}.weight")

    query = paired(tensor("self_attn.q_proj"), config.num_heads)
    query *= 1.0 / math.sqrt(config.head_dim)
    key = paired(tensor("self_attn.k_proj"), config.num_kv_heads)
    value = tensor("self_attn.v_proj")
    before = tensor("input_layernorm")
    after = tensor("post_attention_layernorm")
    for projection in (query, key, value):
        np.multiply(projection, before, out=projection)
    gate, up = tensor("mlp.gate_proj"), tensor("mlp.up_proj")
    for projection in (gate, up):
        np.multiply(projection, after, out=projection)
    return Layer(
        qkv=arrays.matrix(query, key, value),
        out=arrays.matrix(tensor("self_attn.o_proj")),
        mlp=arrays.gated(gate, up, tensor("mlp.down_proj")),
    )


def paired(projection: Floats, heads: int) -> Floats:
    """Rows in rotate_half order (halves) reordered so that a rotary pair's rows are neighbours."""
    import numpy as np

    rows, width = projection.shape
    halves = projection.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)
