"""The few array operations that the model is written in, so that another backend (torch on a GPU)
can take NumPy's place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from dynamo.inference.native.ragged import RaggedBatch

    Floats = np.ndarray[Any, np.dtype[np.float32]]

Array = Any
"""An array of the backend: float32, rows are tokens. Results live until the same operation is
called again with the same `name`: buffers are used again."""


class ArrayBackend(ABC):
    """One backend, one model, one thread at a time."""

    @abstractmethod
    def prepare_matrix(self, *parts: Floats) -> Array:
        """Prepare a linear layer's weights: `parts` are [out, in], stacked along out."""

    @abstractmethod
    def begin_step(self, batch: RaggedBatch) -> None:
        """What follows, up to the next `begin`, is about this step."""

    @abstractmethod
    def embed(self, head: Array) -> Array:
        """[rows, hidden] of the step's ids, out of the (tied or own) embedding as `matrix` made
        it: column i is id i."""

    @abstractmethod
    def rms_norm(self, rows: Array, eps: float) -> Array:
        """Every row over its root mean square."""

    @abstractmethod
    def prepare_gated_mlp(self, gate: Floats, up: Floats, down: Floats) -> Array:
        """Prepare a gated MLP's weights, each [out, in]."""

    @abstractmethod
    def linear(self, rows: Array, weight: Array, name: str) -> Array:
        """rows @ weight."""

    @abstractmethod
    def add_linear(self, total: Array, rows: Array, weight: Array) -> None:
        """total += rows @ weight."""

    @abstractmethod
    def add_gated_mlp(self, total: Array, rows: Array, weights: Array) -> None:
        """total += (silu(rows @ gate) * (rows @ up)) @ down."""

    @abstractmethod
    def attend(self, qkv: Array, layer: int) -> Array:
        """Rotate queries and keys by their positions, put keys and values into the step's areas,
        and attend: [rows, heads * head_dim]."""

    @abstractmethod
    def select_sampled_rows(self, rows: Array) -> Array:
        """The rows whose next token is wanted."""

    @abstractmethod
    def scale(self, rows: Array, factors: Array) -> None:
        """rows *= factors, column by column."""

    @abstractmethod
    def prepare_vector(self, values: Floats) -> Array:
        """Prepare one row of factors."""

    @abstractmethod
    def to_numpy(self, rows: Array) -> Floats:
        """As a NumPy array (may be the backend's own memory)."""

    @abstractmethod
    def stop(self) -> None:
        """Release threads and memory."""
