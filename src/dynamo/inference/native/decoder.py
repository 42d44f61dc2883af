"""The forward pass of decoder-only transformers over a ragged batch.

The factors of norms before a matrix are folded into it, and the scale of scores into the queries.
The rotary pairs of a head are neighbours, so that rotation is one complex multiplication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.inference.native.array_backend import Array, ArrayBackend
from dynamo.models.checkpoint.decoder_config import norm_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.inference.native.buffers import Floats
    from dynamo.models.checkpoint.decoder_config import DecoderConfig
    from dynamo.models.checkpoint.weights import ModelWeights


class DecoderLayer(msgspec.Struct, frozen=True):
    """The weights of one layer. `qk_norm`: the factors of the norm of queries and keys,
    [heads, head_dim]. `attention_norm` and `mlp_norm` are those of norms after the matrices."""

    qkv: Array
    out: Array
    mlp: Array
    qk_norm: Array | None = None
    attention_norm: Array | None = None
    mlp_norm: Array | None = None


class DecoderWeights(msgspec.Struct, frozen=True):
    """The weights of a model, prepared for a backend. Tied models have no `lm_head`."""

    embedding: Array
    lm_head: Array | None
    final_norm: Array
    layers: tuple[DecoderLayer, ...]


def prepare_weights(weights: ModelWeights, backend: ArrayBackend) -> DecoderWeights:
    """Read and prepare all tensors. Raises `ModelUnavailable`."""
    config = weights.config
    embedding = backend.prepare_matrix(weights.stored("model.embed_tokens.weight"))
    lm_head = None if config.tied else backend.prepare_matrix(weights.stored("lm_head.weight"))
    final_norm = weights.tensor("model.norm.weight")
    final_norm *= config.logit_scale
    layers = tuple(_prepare_layer(weights, backend, index) for index in range(config.num_layers))
    return DecoderWeights(embedding, lm_head, backend.prepare_vector(final_norm), layers)


class DecoderModel:
    """A model that computes on a backend. `prepared`: its weights; None: they are read from
    `weights`."""

    def __init__(
        self, weights: ModelWeights, backend: ArrayBackend, prepared: DecoderWeights | None = None
    ) -> None:
        self._config = weights.config
        self._backend = backend
        prepared = prepared or prepare_weights(weights, backend)
        self._embedding, self._final_norm = prepared.embedding, prepared.final_norm
        self._lm_head = prepared.embedding if prepared.lm_head is None else prepared.lm_head
        self._layers = prepared.layers

    def forward(self, batch: Any, read_rows: Callable[[Array], None] | None = None) -> Any:
        """Return the logits of the sampled rows, [samples, vocabulary]. The next call overwrites
        them. `batch` is of the backend's own type. `read_rows` may read all rows of the last
        layer, [rows, hidden], by `project`."""
        backend = self._backend
        backend.begin_step(batch)
        rows = backend.embed(self._embedding, self._config.embedding_scale)
        add_layer = self._add_plain if self._config.norms == "before" else self._add_normed
        for index, layer in enumerate(self._layers):
            add_layer(rows, layer, index)
        if read_rows is not None:
            read_rows(rows)
        if not len(batch.sampled_rows):
            return backend.to_logits(rows[:0])
        return self.project(backend.select_sampled_rows(rows))

    def project(self, rows: Array) -> Any:
        """Return the logits of rows of the last layer. The next call overwrites them."""
        backend = self._backend
        last = backend.rms_norm(rows, self._config.norm_eps)
        backend.scale(last, self._final_norm)
        logits = backend.linear(last, self._lm_head, "logits")
        if self._config.logit_softcap:
            backend.soften(logits, self._config.logit_softcap)
        return backend.to_logits(logits)

    def _add_plain(self, rows: Array, layer: DecoderLayer, index: int) -> None:
        """Add a layer with norms before its matrices, as Llama's."""
        backend, eps = self._backend, self._config.norm_eps
        qkv = backend.linear(backend.rms_norm(rows, eps), layer.qkv, "qkv")
        backend.add_linear(rows, backend.attend(qkv, index, layer.qk_norm), layer.out)
        backend.add_gated_mlp(rows, backend.rms_norm(rows, eps), layer.mlp)

    def _add_normed(self, rows: Array, layer: DecoderLayer, index: int) -> None:
        """Add a layer whose results are normed before they are added (Gemma, OLMo-2)."""
        backend, eps = self._backend, self._config.norm_eps
        normed_input = self._config.norms == "around"
        qkv = backend.linear(
            backend.rms_norm(rows, eps) if normed_input else rows, layer.qkv, "qkv"
        )
        attended = backend.attend(qkv, index, layer.qk_norm)
        added = backend.rms_norm(backend.linear(attended, layer.out, "attention"), eps)
        backend.scale(added, layer.attention_norm)
        rows += added
        mlp = backend.zeros("mlp", len(rows), self._config.hidden_size)
        backend.add_gated_mlp(mlp, backend.rms_norm(rows, eps) if normed_input else rows, layer.mlp)
        added = backend.rms_norm(mlp, eps)
        backend.scale(added, layer.mlp_norm)
        rows += added


def _prepare_layer(weights: ModelWeights, backend: ArrayBackend, index: int) -> DecoderLayer:
    config = weights.config
    rotary_dim = config.rotary_dim or config.head_dim

    def vector(part: str, kind: str = "weight") -> Floats:
        return weights.tensor(f"model.layers.{index}.{part}.{kind}")

    def matrix(part: str, *, changes: bool = True) -> Array:
        stored = weights.stored(f"model.layers.{index}.{part}.weight")
        return backend.load(stored) if changes else stored

    def project(part: str, heads: int, *, changes: bool = True) -> tuple[Array, Floats | None]:
        """Return a projection and its bias, with the rows of the rotary pairs of `heads` heads side
        by side."""
        projection = matrix(f"self_attn.{part}", changes=changes)
        bias = vector(f"self_attn.{part}", "bias") if part in config.biases else None
        if heads:
            interleave_rotary_pairs(projection, heads, rotary_dim)
        if heads and bias is not None:
            interleave_rotary_pairs(bias[:, None], heads, rotary_dim)
        return projection, bias

    query, query_bias = project("q_proj", config.num_heads)
    key, key_bias = project("k_proj", config.num_kv_heads)
    value, value_bias = project("v_proj", 0)
    qk_norm = _read_qk_norm(vector, config)
    if qk_norm is None:
        query *= config.scores_scale
        if query_bias is not None:
            query_bias = query_bias * config.scores_scale
    gate, up = matrix("mlp.gate_proj"), matrix("mlp.up_proj")
    is_scaled = config.residual_scale != 1.0
    out, out_bias = project("o_proj", 0, changes=is_scaled)
    down = matrix("mlp.down_proj", changes=is_scaled)
    if is_scaled:
        out *= config.residual_scale
        down *= config.residual_scale
    before, after = norm_names(config)
    for name, matrices in zip(before, ((query, key, value), (gate, up)), strict=True):
        for each in matrices if name else ():
            backend.scale(each, backend.prepare_vector(vector(name)))
    biases, sizes = (query_bias, key_bias, value_bias), (len(query), len(key), len(value))
    return DecoderLayer(
        qkv=backend.prepare_matrix(query, key, value, bias=_join_biases(biases, sizes)),
        out=backend.prepare_matrix(out, bias=out_bias),
        mlp=backend.prepare_gated_mlp(gate, up, down, config.activation),
        qk_norm=None if qk_norm is None else backend.prepare_vector(qk_norm),
        attention_norm=backend.prepare_vector(vector(after[0])) if after[0] else None,
        mlp_norm=backend.prepare_vector(vector(after[1])) if after[1] else None,
    )


def _read_qk_norm(vector: Callable[[str], Floats], config: DecoderConfig) -> Floats | None:
    """Return the factors of the norm of queries and keys, [heads, head_dim], with the scale of
    scores."""
    import numpy as np

    if not config.qk_norm:
        return None
    rotary_dim = config.rotary_dim or config.head_dim
    factors = []
    for part, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
        values = vector(f"self_attn.{part}").reshape(-1, config.head_dim)
        rows = np.broadcast_to(values, (heads, config.head_dim)).copy()
        interleave_rotary_pairs(rows.reshape(-1, 1), heads, rotary_dim)
        factors.append(rows)
    factors[0] = factors[0] * np.float32(config.scores_scale)
    return np.concatenate(factors)


def _join_biases(biases: tuple[Floats | None, ...], sizes: tuple[int, ...]) -> Floats | None:
    import numpy as np

    if all(bias is None for bias in biases):
        return None
    parts = [
        np.zeros(size, np.float32) if bias is None else bias
        for bias, size in zip(biases, sizes, strict=True)
    ]
    return np.concatenate(parts)


def interleave_rotary_pairs(projection: Array, heads: int, rotary_dim: int) -> None:
    """Reorder the first `rotary_dim` rows of each head from rotate_half order (two halves) so that
    rotary pairs are neighbours, in place."""
    rows, width = projection.shape
    turned = projection.reshape(heads, rows // heads, width)[:, :rotary_dim]
    halves = turned.reshape(heads, 2, rotary_dim // 2, width)
    turned[...] = halves.swapaxes(1, 2).reshape(turned.shape)
