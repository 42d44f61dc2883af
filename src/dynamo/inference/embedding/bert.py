"""`BertEncoder`: an encoder of the BERT shape in NumPy, which pools each text to one vector.

Source: Devlin et al., "BERT", 2019, and the sentence-transformers models on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dynamo.core.errors import ModelUnavailable

if TYPE_CHECKING:
    from dynamo.models.checkpoint.quantization import Floats
    from dynamo.models.checkpoint.safetensors import SafetensorsFolder
    from dynamo.models.embedding_model import EmbeddingModel

ROWS_PER_BLOCK = 64
"""Rows of the feed-forward layer that are computed at a time, so that they stay in the cache."""
MAX_SCORES = 1 << 20
"""Attention scores that are computed at a time, in texts of equal length."""

_ERF_SCALE = 0.3275911
_ERF_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


class _Linear:
    """A matrix, transposed for row vectors, and its bias."""

    def __init__(self, folder: SafetensorsFolder, *names: str) -> None:
        """The outputs of several layers with one input are concatenated."""
        self.matrix = np.concatenate([folder.tensor(f"{name}.weight") for name in names]).T.copy()
        self.bias = np.concatenate([folder.tensor(f"{name}.bias") for name in names])

    def __call__(self, rows: Floats) -> Floats:
        result: Floats = rows @ self.matrix
        result += self.bias
        return result


class _Norm:
    """Layer normalisation, in place."""

    def __init__(self, folder: SafetensorsFolder, name: str, epsilon: float) -> None:
        self._scale = folder.tensor(f"{name}.weight")
        self._bias = folder.tensor(f"{name}.bias")
        self._epsilon = np.float32(epsilon)

    def __call__(self, rows: Floats) -> Floats:
        rows -= rows.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", rows, rows)[:, None] / np.float32(rows.shape[1])
        rows /= np.sqrt(variance + self._epsilon)
        rows *= self._scale
        rows += self._bias
        return rows


class _Layer:
    """Attention over the tokens of each text, then a feed-forward layer for each token."""

    def __init__(self, folder: SafetensorsFolder, name: str, heads: int, epsilon: float) -> None:
        own = f"{name}.attention.self"
        self._qkv = _Linear(folder, f"{own}.query", f"{own}.key", f"{own}.value")
        self._attention_output = _Linear(folder, f"{name}.attention.output.dense")
        self._attention_norm = _Norm(folder, f"{name}.attention.output.LayerNorm", epsilon)
        self._up = _Linear(folder, f"{name}.intermediate.dense")
        self._down = _Linear(folder, f"{name}.output.dense")
        self._norm = _Norm(folder, f"{name}.output.LayerNorm", epsilon)
        self._heads = heads

    def __call__(self, rows: Floats, groups: Sequence[tuple[int, int, int]]) -> Floats:
        qkv = self._qkv(rows)
        mixed = np.empty_like(rows)
        for start, texts, length in groups:
            end = start + texts * length
            mixed[start:end] = self._attend(qkv[start:end], texts, length)
        rows = self._attention_norm(rows + self._attention_output(mixed))
        output = np.empty_like(rows)
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            block = slice(start, start + ROWS_PER_BLOCK)
            output[block] = self._down(gelu(self._up(rows[block])))
        output += rows
        return self._norm(output)

    def _attend(self, qkv: Floats, texts: int, length: int) -> Floats:
        """Mix the values of each of `texts` texts of equal `length`; [texts * length, hidden]."""
        hidden = qkv.shape[1] // 3
        size = hidden // self._heads
        parts = qkv.reshape(texts, length, 3, self._heads, size).transpose(2, 0, 3, 1, 4)
        scores: Floats = parts[0] @ parts[1].swapaxes(2, 3)
        scores *= np.float32(size**-0.5)
        scores -= scores.max(axis=3, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=3, keepdims=True)
        mixed: Floats = (scores @ parts[2]).transpose(0, 2, 1, 3).reshape(texts * length, hidden)
        return mixed


class BertEncoder:
    """Computes the embeddings of texts. `encode` may run in several threads at a time."""

    def __init__(self, folder: SafetensorsFolder, model: EmbeddingModel) -> None:
        """Read the weights. Raises `ModelUnavailable` for weights that do not fit the shape."""
        prefix = "" if "embeddings.word_embeddings.weight" in folder.tensors else "bert."
        table = f"{prefix}embeddings"
        epsilon = model.layer_norm_eps
        self._words = folder.tensor(f"{table}.word_embeddings.weight")
        kinds = folder.tensor(f"{table}.token_type_embeddings.weight")
        self._positions = folder.tensor(f"{table}.position_embeddings.weight") + kinds[0]
        self._norm = _Norm(folder, f"{table}.LayerNorm", epsilon)
        self._layers = [
            _Layer(folder, f"{prefix}encoder.layer.{number}", model.num_attention_heads, epsilon)
            for number in range(model.num_hidden_layers)
        ]
        self._model = model
        expected = (model.vocab_size, model.hidden_size)
        if self._words.shape != expected or len(self._positions) < model.context_tokens:
            raise ModelUnavailable(
                f"the weights hold {self._words.shape} embeddings and {len(self._positions)} "
                f"positions, and the configuration says {expected} and {model.context_tokens}"
            )
        if model.hidden_size % model.num_attention_heads:
            raise ModelUnavailable(
                f"hidden_size {model.hidden_size} cannot be divided by num_attention_heads "
                f"{model.num_attention_heads}"
            )

    def encode(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Return one vector for each text of token ids, in their order: float32 [texts, hidden].

        No text is empty or longer than the model's context.
        """
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        ordered = [texts[number] for number in order]
        ids = np.concatenate([np.asarray(text, np.int64) for text in ordered])
        positions = np.concatenate([np.arange(len(text)) for text in ordered])
        rows = self._norm(self._words[ids] + self._positions[positions])
        groups = list(_equal_lengths(ordered, self._model.num_attention_heads))
        for layer in self._layers:
            rows = layer(rows, groups)
        starts = np.cumsum([0, *(len(text) for text in ordered[:-1])])
        if self._model.pooling == "mean":
            lengths = np.array([len(text) for text in ordered], np.float32)
            pooled: Floats = np.add.reduceat(rows, starts, axis=0)
            pooled /= lengths[:, None]
        else:
            pooled = rows[starts]
        vectors = np.empty_like(pooled)
        vectors[order] = pooled
        return normalise(vectors) if self._model.normalised else vectors


def _equal_lengths(texts: Sequence[Sequence[int]], heads: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, number of texts, length) of runs of texts with one length."""
    row = first = 0
    while first < len(texts):
        length = len(texts[first])
        most = max(1, MAX_SCORES // (heads * length * length))
        end = first
        while end < len(texts) and end - first < most and len(texts[end]) == length:
            end += 1
        yield row, end - first, length
        row += (end - first) * length
        first = end


def gelu(values: Floats) -> Floats:
    """Return x * (1 + erf(x / sqrt 2)) / 2, computed in place; its error is at most 2e-7.

    Source: Abramowitz and Stegun, formula 7.1.26.
    """
    scaled = values * np.float32(0.5**0.5)
    negative = np.exp(-scaled * scaled)
    reduced = np.abs(scaled)
    reduced *= np.float32(_ERF_SCALE)
    reduced += np.float32(1)
    np.reciprocal(reduced, out=reduced)
    series = reduced * np.float32(_ERF_COEFFICIENTS[0])
    for coefficient in _ERF_COEFFICIENTS[1:]:
        series += np.float32(coefficient)
        series *= reduced
    series *= negative
    np.subtract(np.float32(1), series, out=series)
    np.copysign(series, scaled, out=series)
    series += np.float32(1)
    values *= series
    values *= np.float32(0.5)
    return values


def normalise(vectors: Floats) -> Floats:
    """Return the vectors with length 1; a zero vector stays zero."""
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, None]
    result: Floats = vectors / np.maximum(lengths, np.float32(1e-12))
    return result


def cut_vectors(vectors: Sequence[Floats], dimensions: int) -> bytes:
    """Return the first `dimensions` elements of each vector as float32 in little-endian order. A
    vector that is cut gets length 1."""
    stacked = np.stack(vectors)
    if dimensions < stacked.shape[1]:
        stacked = normalise(stacked[:, :dimensions])
    return stacked.astype("<f4").tobytes()
