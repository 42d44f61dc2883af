"""The array operations of the model, for NumPy and torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Floats
    from dynamo.models.checkpoint.quantization import Stored

Array = Any
"""A float32 array of the backend whose rows are tokens.

A result is valid until the same operation is called with the same `name`, because buffers are
reused.
"""


class ArrayBackend(ABC):
    """The operations of one backend for one model. Only one thread may call it at a time."""

    @abstractmethod
    def load(self, values: Stored) -> Array:
        """Copy a tensor of `ModelWeights.stored` to the device, as float32 that may be changed."""

    @abstractmethod
    def prepare_matrix(self, *parts: Array, bias: Floats | None = None) -> Array:
        """Prepare a linear layer's weights: `parts` are [out, in], stacked along out. Each is a
        result of `load`, or a tensor of `ModelWeights.stored`."""

    @abstractmethod
    def begin_step(self, batch: Any) -> None:
        """Start a step: the operations until the next `begin_step` belong to `batch`, which is of
        the backend's own type."""

    @abstractmethod
    def embed(self, head: Array, scale: float) -> Array:
        """Return the embeddings of the step's token ids times `scale`, [rows, hidden]. `head` is
        the result of `prepare_matrix`; its column i belongs to id i."""

    @abstractmethod
    def rms_norm(self, rows: Array, eps: float) -> Array:
        """Divide every row by its root mean square."""

    @abstractmethod
    def prepare_gated_mlp(
        self, gate: Array, up: Array, down: Array, activation: str = "silu"
    ) -> Array:
        """Prepare a gated MLP's weights, each [out, in] as in `prepare_matrix`. `activation`: silu
        or gelu_tanh."""

    @abstractmethod
    def linear(self, rows: Array, weight: Array, name: str) -> Array:
        """Compute rows @ weight, and add the bias."""

    @abstractmethod
    def add_linear(self, total: Array, rows: Array, weight: Array) -> None:
        """Compute total += rows @ weight."""

    @abstractmethod
    def add_gated_mlp(self, total: Array, rows: Array, weights: Array) -> None:
        """Compute total += (activation(rows @ gate) * (rows @ up)) @ down."""

    @abstractmethod
    def attend(self, qkv: Array, layer: int, qk_norm: Array | None = None) -> Array:
        """Compute attention: [rows, heads * head_dim]. Queries and keys are normed, if there are
        factors `qk_norm`, and rotated by their positions. Keys and values are written into the
        areas or blocks of the step's sequences."""

    @abstractmethod
    def zeros(self, name: str, rows: int, width: int) -> Array:
        """Return rows of zeros."""

    @abstractmethod
    def soften(self, rows: Array, cap: float) -> None:
        """Replace each x in place by cap * tanh(x / cap)."""

    @abstractmethod
    def select_sampled_rows(self, rows: Array) -> Array:
        """Return the rows whose next token is sampled."""

    @abstractmethod
    def scale(self, rows: Array, factors: Array) -> None:
        """Multiply each column of `rows` in place by its factor."""

    @abstractmethod
    def prepare_vector(self, values: Floats) -> Array:
        """Prepare a row of factors."""

    @abstractmethod
    def to_logits(self, rows: Array) -> Any:
        """Return logits as the backend's sampler takes them, which may share its memory."""

    @abstractmethod
    def stop(self) -> None:
        """Release threads and memory."""
