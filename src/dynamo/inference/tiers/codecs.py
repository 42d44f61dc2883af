"""Encodings of the blocks in a tier: none, zstd (lossless) and int8 (may change texts)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dynamo.communication.transfer.compression import check_zstd, compress, decompress
from dynamo.communication.transfer.layout import cast_elements
from dynamo.core.errors import ConfigError, TransferFailed
from dynamo.inference.model_runner import BlockShape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RAW: Final = 0
ZSTD: Final = 1
INT8: Final = 2
INT8_MAX: Final = 127


class CorruptBlock(Exception):
    """A store returned something else than the block that was stored."""


class ForeignBlock(CorruptBlock):
    """A block of another prompt has the same hash. Clients can bring that about."""


class BlockCodec:
    """Encodes blocks of `block_bytes` in at most `max_bytes`: this one as they are. Usable from any
    thread."""

    kind = RAW

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = self.max_bytes = block_bytes

    def encode(self, block: memoryview) -> tuple[int, bytes | memoryview]:
        """Return the kind of encoding and the encoded block."""
        return RAW, block

    def decode(self, kind: int, data: memoryview, block: memoryview) -> None:
        """Write the decoded block to `block`. Raises `CorruptBlock` if `data` is not an encoding of
        a block of this size."""
        if kind != RAW or len(data) != len(block):
            raise CorruptBlock(f"{len(data)} bytes in encoding {kind} are no block")
        block[:] = data


class ZstdCodec(BlockCodec):
    """Compresses blocks by zstd, level 1, without loss. A block that does not shrink is stored as
    it is."""

    kind = ZSTD

    def encode(self, block: memoryview) -> tuple[int, bytes | memoryview]:
        data = compress(block)
        return (RAW if data is block else ZSTD), data

    def decode(self, kind: int, data: memoryview, block: memoryview) -> None:
        if kind != ZSTD:
            return super().decode(kind, data, block)
        if len(data) >= len(block):
            raise CorruptBlock(f"zstd in {len(data)} bytes is no block")
        try:
            return decompress(data, block)
        except TransferFailed as error:
            raise CorruptBlock(error.message) from error


class Int8Codec(BlockCodec):
    """Rounds numbers to 8 bits, with a scale for each channel of each [tokens, channels] array.

    An encoding has the scales as float32, [groups, channels], then int8, [groups, tokens,
    channels]. Blocks with numbers that are not finite are stored as they are.
    """

    kind = INT8

    def __init__(self, block_bytes: int, shape: BlockShape) -> None:
        if block_bytes % shape.group_bytes:
            raise ValueError(f"{shape} does not divide {block_bytes} bytes")
        super().__init__(block_bytes)
        self._shape = shape
        self._groups = block_bytes // shape.group_bytes
        self._scale_bytes = 4 * self._groups * shape.channels
        self._encoded_bytes = self._scale_bytes + self._groups * shape.tokens * shape.channels
        self.max_bytes = max(block_bytes, self._encoded_bytes)

    def encode(self, block: memoryview) -> tuple[int, bytes | memoryview]:
        import numpy as np

        numbers = self._load(block)
        peaks = np.abs(numbers).max(axis=1, keepdims=True)
        if not np.isfinite(peaks).all():
            return RAW, block
        scales = (peaks / INT8_MAX).astype(np.float32)
        divisors = np.where(scales > 0, scales, np.float32(1))
        rounded = np.rint(numbers / divisors).clip(-INT8_MAX, INT8_MAX).astype(np.int8)
        return INT8, scales.tobytes() + rounded.tobytes()

    def decode(self, kind: int, data: memoryview, block: memoryview) -> None:
        import numpy as np

        if kind != INT8:
            super().decode(kind, data, block)
            return
        if len(data) != self._encoded_bytes:
            raise CorruptBlock(f"{len(data)} bytes in encoding {kind} are no block")
        shape = self._shape
        scales = np.frombuffer(data[: self._scale_bytes], np.float32)
        rounded = np.frombuffer(data[self._scale_bytes :], np.int8)
        numbers = rounded.reshape(self._groups, shape.tokens, shape.channels) * scales.reshape(
            self._groups, 1, shape.channels
        )
        block[:] = memoryview(cast_elements(numbers, "float32", shape.dtype).tobytes())

    def _load(self, block: memoryview) -> NDArray[np.float32]:
        import numpy as np

        dtype = self._shape.dtype
        stored = np.frombuffer(bytes(block), np.uint16 if dtype == "bfloat16" else dtype)
        numbers = cast_elements(stored, dtype, "float32")
        return numbers.reshape(self._groups, self._shape.tokens, self._shape.channels)


def open_codec(
    name: str,
    block_bytes: int,
    shape: BlockShape | None = None,
    setting: str = "cache.ssd_compression",
) -> BlockCodec:
    """Return the codec "none", "zstd" or "int8", which `setting` names. Raises `ConfigError` if it
    cannot work here."""
    if name == "none":
        return BlockCodec(block_bytes)
    if name == "zstd":
        check_zstd(setting)
        return ZstdCodec(block_bytes)
    if shape is None or block_bytes % shape.group_bytes:
        raise ConfigError(
            "the KV blocks of this engine have no channels, which the encoding int8 needs",
            hint=f"set {setting} to none or zstd",
            param=setting,
        )
    return Int8Codec(block_bytes, shape)
