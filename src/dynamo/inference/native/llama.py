"""The forward pass of Llama-shaped models over a ragged batch.

Norm factors are folded into the matrices after them, and the attention scale into the queries. The
rotary pairs of a head are neighbours, so that rotation is one complex multiplication.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from dynamo.inference.native.array_backend import Array, ArrayBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.inference.native.buffers import Floats
    from dynamo.inference.native.ragged import RaggedBatch
    from dynamo.models.checkpoint.weights import ModelWeights


class LlamaLayer(msgspec.Struct, frozen=True):
    """The matrices of one transformer layer."""

    qkv: Array
    out: Array
    mlp: Array


class LlamaModel:
    """A model's weights, prepared for a backend."""

    def __init__(self, weights: ModelWeights, backend: ArrayBackend) -> None:
        config = weights.config
        self._backend = backend
        self._norm_eps = config.norm_eps
        embedding = weights.tensor("model.embed_tokens.weight")
        self._embedding = backend.prepare_matrix(embedding)
        self._lm_head = (
            self._embedding
            if config.tied
            else backend.prepare_matrix(weights.tensor("lm_head.weight"))
        )
        self._final_norm = backend.prepare_vector(weights.tensor("model.norm.weight"))
        self._layers = [
            _prepare_layer(weights, backend, index) for index in range(config.num_layers)
        ]

    def forward(
        self, batch: RaggedBatch, read_rows: Callable[[Array], None] | None = None
    ) -> Floats:
        """Return the logits of the sampled rows, [samples, vocabulary]. The next call overwrites
        them. `read_rows` may read all rows of the last layer, [rows, hidden], by `project`."""
        backend, eps = self._backend, self._norm_eps
        backend.begin_step(batch)
        rows = backend.embed(self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = backend.linear(backend.rms_norm(rows, eps), layer.qkv, "qkv")
            backend.add_linear(rows, backend.attend(qkv, index), layer.out)
            backend.add_gated_mlp(rows, backend.rms_norm(rows, eps), layer.mlp)
        if read_rows is not None:
            read_rows(rows)
        if not len(batch.sampled_rows):
            return backend.to_numpy(rows[:0])
        return self.project(backend.select_sampled_rows(rows))

    def project(self, rows: Array) -> Floats:
        """Return the logits of rows of the last layer. The next call overwrites them."""
        backend = self._backend
        last = backend.rms_norm(rows, self._norm_eps)
        backend.scale(last, self._final_norm)
        return backend.to_numpy(backend.linear(last, self._lm_head, "logits"))


def _prepare_layer(weights: ModelWeights, backend: ArrayBackend, index: int) -> LlamaLayer:
    import numpy as np

    config = weights.config

    def tensor(part: str) -> Floats:
        return weights.tensor(f"model.layers.{index}.{part}.weight")

    query = interleave_rotary_pairs(tensor("self_attn.q_proj"), config.num_heads)
    query *= 1.0 / math.sqrt(config.head_dim)
    key = interleave_rotary_pairs(tensor("self_attn.k_proj"), config.num_kv_heads)
    value = tensor("self_attn.v_proj")
    input_norm = tensor("input_layernorm")
    mlp_norm = tensor("post_attention_layernorm")
    for projection in (query, key, value):
        np.multiply(projection, input_norm, out=projection)
    gate, up = tensor("mlp.gate_proj"), tensor("mlp.up_proj")
    for projection in (gate, up):
        np.multiply(projection, mlp_norm, out=projection)
    return LlamaLayer(
        qkv=backend.prepare_matrix(query, key, value),
        out=backend.prepare_matrix(tensor("self_attn.o_proj")),
        mlp=backend.prepare_gated_mlp(gate, up, tensor("mlp.down_proj")),
    )


def interleave_rotary_pairs(projection: Floats, heads: int) -> Floats:
    """Reorder rows from rotate_half order (two halves) so that rotary pairs are neighbours."""
    import numpy as np

    rows, width = projection.shape
    halves = projection.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)
