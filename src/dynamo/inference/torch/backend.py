"""The array operations of the decoder in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from dynamo.inference.native.array_backend import ArrayBackend
from dynamo.inference.torch.attention import BlockAttention

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Floats
    from dynamo.inference.torch.batch import PagedBatch
    from dynamo.models.checkpoint.decoder_config import DecoderConfig, Rotary
    from dynamo.models.checkpoint.quantization import Stored

PIECE_BYTES = 32 << 20
"""Weights go from their file to the device in pieces of this size."""


class Linear(NamedTuple):
    """A matrix [out, in] and its bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class GatedMlp(NamedTuple):
    """The matrices of a gated MLP; `gate_up` has the rows of both."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str


class TorchBackend(ArrayBackend):
    """The operations on one device. Results are new tensors."""

    def __init__(
        self, config: DecoderConfig, rotary: Rotary, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._device, self._dtype = device, dtype
        self.attention = BlockAttention(config, rotary, device)
        self._batch: PagedBatch

    def load(self, values: Stored) -> torch.Tensor:
        matrix = torch.empty(values.shape, dtype=torch.float32, device=self._device)
        self._fill(matrix, values)
        return matrix

    def _fill(self, target: torch.Tensor, values: Stored) -> None:
        """Copy a matrix of `ModelWeights.stored`. The device converts the numbers, and on a card
        the host reads the next piece meanwhile."""
        on_card = self._device.type == "cuda"
        rows = max(1, PIECE_BYTES // values[0].nbytes)
        for low in range(0, len(values), rows):
            stored = values[low : low + rows]
            dtype = getattr(torch, stored.dtype.name)
            piece = torch.empty(stored.shape, dtype=dtype, pin_memory=on_card)
            piece.numpy()[...] = stored
            if dtype == torch.uint16:
                piece = piece.view(torch.bfloat16)
            target[low : low + rows] = piece.to(self._device, non_blocking=True)

    def _join(self, *parts: torch.Tensor | Stored) -> torch.Tensor:
        size = sum(map(len, parts)), parts[0].shape[1]
        joined = torch.empty(size, dtype=self._dtype, device=self._device)
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            if isinstance(part, torch.Tensor):
                rows.copy_(part)
            else:
                self._fill(rows, part)
        return joined

    def prepare_matrix(self, *parts: torch.Tensor | Stored, bias: Floats | None = None) -> Linear:
        row = None if bias is None else self.prepare_vector(bias).to(self._dtype)
        return Linear(self._join(*parts), row)

    def prepare_vector(self, values: Floats) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def prepare_gated_mlp(
        self,
        gate: torch.Tensor | Stored,
        up: torch.Tensor | Stored,
        down: torch.Tensor | Stored,
        activation: str = "silu",
    ) -> GatedMlp:
        return GatedMlp(self._join(gate, up), self._join(down), activation)

    def begin_step(self, batch: PagedBatch) -> None:
        self._batch = batch
        self.attention.begin_step(batch)

    def embed(self, head: Linear, scale: float) -> torch.Tensor:
        rows = functional.embedding(self._batch.token_ids, head.weight)
        return rows * scale if scale != 1.0 else rows

    def rms_norm(self, rows: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(rows, rows.shape[1:], eps=eps)

    def linear(self, rows: torch.Tensor, weight: Linear, name: str) -> torch.Tensor:
        del name
        return functional.linear(rows, *weight)

    def add_linear(self, total: torch.Tensor, rows: torch.Tensor, weight: Linear) -> None:
        if weight.bias is not None:
            total += weight.bias
        total.addmm_(rows, weight.weight.T)

    def add_gated_mlp(self, total: torch.Tensor, rows: torch.Tensor, weights: GatedMlp) -> None:
        gate_up = functional.linear(rows, weights.gate_up)
        if self.attention.uses_kernels:
            from dynamo.inference.torch.kernels import gate_rows as gate
        else:
            gate = gate_rows
        total.addmm_(gate(gate_up, weights.activation), weights.down.T)

    def attend(
        self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.attention(qkv, layer, qk_norm)

    def zeros(self, name: str, rows: int, width: int) -> torch.Tensor:
        del name
        return torch.zeros(rows, width, dtype=self._dtype, device=self._device)

    def soften(self, rows: torch.Tensor, cap: float) -> None:
        rows.div_(cap).tanh_().mul_(cap)

    def select_sampled_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self._batch.sampled_rows]

    def scale(self, rows: torch.Tensor, factors: torch.Tensor) -> None:
        rows *= factors

    def to_logits(self, rows: torch.Tensor) -> Any:
        return rows.float()

    def stop(self) -> None:
        del self.attention.kv_blocks


def gate_rows(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, [rows, inner], of rows with both: [rows, 2 * inner]."""
    gate, up = gate_up.chunk(2, 1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up
