"""zstd for blocks in tiers, and for pulled blocks where a link is so slow that it pays."""

from __future__ import annotations

from importlib.util import find_spec
from time import perf_counter
from typing import Final

from dynamo.core.errors import ConfigError, TransferFailed
from dynamo.core.installation import install_command

ZSTD: Final = 1
"""Number of the encoding in reads of `tcp:`. 0: no encoding."""
ZSTD_LEVEL: Final = 1
INITIAL_RATIO: Final = 1.25
INITIAL_BYTES_PER_S: Final = 0.2e9
"""Measured: ratio and rate of zstd on KV, with one core."""
MIN_RATIO: Final = 1.05
LEARNING_RATE: Final = 0.25
PLAIN_EVERY: Final = 16
"""Each pull of this number is not compressed, so that the rate of the link stays known."""


def compression_pays(ratio: float, codec_bytes_per_s: float, link_bytes_per_s: float) -> bool:
    """Whether compressed bytes arrive sooner, with the time of the codec."""
    return ratio >= MIN_RATIO and (1 - 1 / ratio) / link_bytes_per_s > 1 / codec_bytes_per_s


class LinkCompression:
    """Chooses for each pull from a peer whether its blocks are compressed."""

    def __init__(self) -> None:
        self.ratio = INITIAL_RATIO
        self.bytes_per_s = INITIAL_BYTES_PER_S
        self._pulls = 0

    def choose(self, link_bytes_per_s: float) -> bool:
        """Return whether to compress the next pull over a link that carries so much."""
        self._pulls += 1
        return self._pulls % PLAIN_EVERY != 0 and compression_pays(
            self.ratio, self.bytes_per_s, link_bytes_per_s
        )

    def on_pulled(
        self, size: int, wire_bytes: int, seconds: float, link_bytes_per_s: float
    ) -> None:
        """Learn from a compressed pull of `size` bytes, which were `wire_bytes` on the link."""
        self.ratio += LEARNING_RATE * (size / max(1, wire_bytes) - self.ratio)
        codec_s = max(seconds - wire_bytes / link_bytes_per_s, 0.1 * seconds, 1e-6)
        self.bytes_per_s += LEARNING_RATE * (size / codec_s - self.bytes_per_s)


def check_zstd(setting: str) -> None:
    """Raise `ConfigError` if blocks cannot be compressed here, as `setting` wants."""
    if find_spec("zstandard") is None:
        raise ConfigError(
            f"{setting} zstd needs the package zstandard",
            hint=f"{install_command('zstd')}, or set {setting} to none",
            param=setting,
        )


def compress(slot: memoryview) -> bytes | memoryview:
    """Return the slot in zstd, or as it is if that is not smaller."""
    import zstandard

    data: bytes = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(slot)
    return data if len(data) < len(slot) else slot


def measure_codec(sample: memoryview) -> tuple[float, float]:
    """Return the ratio of a sample and the bytes per second that are compressed."""
    compress(sample[:0])  # imports the library
    started_s = perf_counter()
    ratio = len(sample) / len(compress(sample))
    return ratio, len(sample) / (perf_counter() - started_s)


def decompress(data: memoryview, slot: memoryview) -> None:
    """Write the decoded data to `slot`. Raises `TransferFailed` if it has not that size."""
    import zstandard

    if len(data) == len(slot):
        slot[:] = data
        return
    try:
        size = zstandard.frame_content_size(data)  # the decompressor would allocate it
        if size == len(slot):
            slot[:] = zstandard.ZstdDecompressor().decompress(data)
            return
    except zstandard.ZstdError as error:
        raise TransferFailed.of("checksum", f"unreadable zstd: {error}") from error
    raise TransferFailed.of("checksum", f"zstd of {size} bytes is no slot of {len(slot)}")
