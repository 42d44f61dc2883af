"""A digest of a model's weights, so that only workers with equal weights exchange KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh3_128

from dynamo.models.checkpoint.quantization import widen
from dynamo.models.checkpoint.weights import ModelWeights

if TYPE_CHECKING:
    from dynamo.models.checkpoint.quantization import Floats, Stored

SAMPLES_PER_TENSOR = 1024


class DigestedWeights(ModelWeights):
    """Weights that hash a sample of each tensor when it is read. Files in several formats that
    hold the same numbers have the same digest if the tensors are read in the same order."""

    def __init__(self, weights: ModelWeights) -> None:
        self.config = weights.config
        self._weights = weights
        self._hash = xxh3_128(repr(weights.config).encode())

    @property
    def digest(self) -> str:
        """The digest of the configuration and of the tensors that were read so far."""
        return self._hash.hexdigest()

    def copy(self) -> DigestedWeights:
        """Return the same weights, whose digest is not changed by reads of the original."""
        copied = DigestedWeights(self._weights)
        copied._hash = self._hash.copy()
        return copied

    def has_tensor(self, name: str) -> bool:
        return self._weights.has_tensor(name)

    def _read(self, name: str) -> Stored:
        stored = self._weights.stored(name)
        values = stored.reshape(-1)
        sample = values[:: max(1, values.size // SAMPLES_PER_TENSOR)]
        self._hash.update(widen(sample).tobytes())
        return stored

    def rope_divisors(self, context_tokens: int = 0) -> Floats:
        divisors = self._weights.rope_divisors(context_tokens)
        self._hash.update(divisors.tobytes())
        return divisors

    def close(self) -> None:
        self._weights.close()
