"""`MemoryDescriptorOptimizer` and `NetworkOptimizer`: how to move memory, as a library.

Both call what pulls call: the merging and grouping of pieces, the estimate of a link, the size of a
transfer, and the choice to compress.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from sys import maxsize
from typing import Any, Final, Literal

import msgspec

from dynamo.communication.transfer.compression import compression_pays, measure_codec
from dynamo.communication.transfer.estimate import TransferEstimate
from dynamo.communication.transfer.runs import (
    MAX_PIECES,
    MAX_TRANSFER_BYTES,
    group_pieces,
    merge_pieces,
    transfer_bytes,
)
from dynamo.core.values import read_field

MAX_CACHED: Final = 64
MAX_LINKS: Final = 256
DEFAULT_LATENCY_S: Final = 0.0005
DEFAULT_BYTES_PER_S: Final = 1e9
SAMPLE_BYTES: Final = 256 << 10


class MemoryDescriptor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A piece of memory of a device."""

    device: int
    address: int
    size: int

    @property
    def end(self) -> int:
        """The address behind the piece."""
        return self.address + self.size


class OptimizedDescriptors(msgspec.Struct, frozen=True):
    """Merged pieces; `transfer_plan` lists those of one transfer after the other.

    `compression_ratio` is the number of raw pieces divided by that of merged ones.
    """

    blocks: tuple[MemoryDescriptor, ...]
    transfer_plan: tuple[tuple[MemoryDescriptor, ...], ...]
    compression_ratio: float


class ContinuousBlockMerger:
    """Merges pieces of memory that follow each other."""

    def merge_continuous_blocks(self, raw_descriptors: Iterable[Any]) -> list[MemoryDescriptor]:
        """Return the merged pieces in order of their addresses.

        Raw ones are `MemoryDescriptor`s or have `gpu_addr` or `address`, `size` and perhaps
        `device_id`, as attributes or keys.
        """
        raw = sorted(_descriptor(descriptor) for descriptor in raw_descriptors)
        return [
            MemoryDescriptor(device, address, size)
            for device, pieces in groupby(raw, attrgetter("device"))
            for address, _, size in merge_pieces(
                ((p.address, p.address, p.size) for p in pieces), maxsize
            )
        ]


class MemoryDescriptorOptimizer:
    """Merges pieces, and plans their transfers. Plans of the same pieces are cached."""

    def __init__(self) -> None:
        self.block_merger = ContinuousBlockMerger()
        self._plans: dict[tuple[MemoryDescriptor, ...], OptimizedDescriptors] = {}

    def optimize_descriptors(self, raw_descriptors: Sequence[Any]) -> OptimizedDescriptors:
        """Return the merged pieces and the transfers that carry them."""
        raw = tuple(_descriptor(descriptor) for descriptor in raw_descriptors)
        plan = self._plans.get(raw)
        if plan is None:
            blocks = tuple(self.block_merger.merge_continuous_blocks(raw))
            ratio = len(raw) / len(blocks) if blocks else 1.0
            sizes = [block.size for block in blocks]
            groups = group_pieces(sizes, MAX_TRANSFER_BYTES, MAX_PIECES)
            plan = OptimizedDescriptors(blocks, tuple(blocks[group] for group in groups), ratio)
            if len(self._plans) >= MAX_CACHED:
                del self._plans[next(iter(self._plans))]
            self._plans[raw] = plan
        return plan


class TransferRequest(msgspec.Struct, frozen=True):
    """Data to move. A sample tells how far it can be compressed."""

    data_size: int
    source: str = ""
    destination: str = ""
    data_type: str = "kv_cache"
    data_sample: bytes = b""


class TransferStrategy(msgspec.Struct, frozen=True):
    """How to move data: at once, in chunks of `chunk_size`, or compressed chunks."""

    kind: Literal["direct", "chunked", "compressed"]
    chunk_size: int
    algorithm: str = "none"
    compression_ratio: float = 1.0
    compression_time: float = 0.0


class OptimizedTransfer(msgspec.Struct, frozen=True):
    """A strategy, with seconds and bytes per second that the link is expected to take and give."""

    strategy: TransferStrategy
    predicted_latency: float
    expected_bandwidth: float
    compression_ratio: float = 1.0


class NetworkOptimizerConfig(msgspec.Struct, frozen=True):
    """Bytes and seconds beyond which data is compressed or divided."""

    compression_threshold: int = 64 << 20
    latency_threshold: float = 0.05


class NetworkOptimizer:
    """Chooses how to move data by what each link has delivered."""

    def __init__(self, config: Any = None) -> None:
        """`config` has `compression_threshold` (bytes) and `latency_threshold` (seconds)."""
        self.config = config or NetworkOptimizerConfig()
        self._links: dict[tuple[str, str], TransferEstimate] = {}

    def observe(self, source: str, destination: str, size: int, seconds: float) -> None:
        """Learn from a transfer."""
        link = self._link(source, destination)
        link.start(size, 0.0)
        link.finish(size, seconds, completed=True)

    async def optimize_data_transfer(self, transfer_request: Any) -> OptimizedTransfer:
        """Return the strategy for a `TransferRequest`, or an object with its fields.

        Data above `compression_threshold` is compressed, if that makes it smaller and sooner there.
        Data that takes longer than `latency_threshold` is divided.
        """
        request = transfer_request
        link = self._link(request.source, request.destination)
        latency_s, bytes_per_s = link.predict_s(request.data_size), link.bytes_per_s
        chunk = transfer_bytes(bytes_per_s)
        kind: Literal["direct", "chunked"] = "direct"
        if latency_s > self.config.latency_threshold:
            kind = "chunked"
        strategy = TransferStrategy(kind, chunk if kind == "chunked" else request.data_size)
        if request.data_size > self.config.compression_threshold:
            strategy = _compressed(request, bytes_per_s, chunk) or strategy
        return OptimizedTransfer(strategy, latency_s, bytes_per_s, strategy.compression_ratio)

    def _link(self, source: str, destination: str) -> TransferEstimate:
        link = self._links.get((source, destination))
        if link is None:
            if len(self._links) >= MAX_LINKS:
                del self._links[next(iter(self._links))]
            link = TransferEstimate(DEFAULT_LATENCY_S, DEFAULT_BYTES_PER_S)
            self._links[source, destination] = link
        return link


def _compressed(request: Any, bytes_per_s: float, chunk: int) -> TransferStrategy | None:
    """The strategy with compression, measured on the sample; None if it does not pay."""
    sample = bytes(request.data_sample[:SAMPLE_BYTES])
    if not sample or find_spec("zstandard") is None:
        return None
    ratio, codec_bytes_per_s = measure_codec(memoryview(sample))
    if not compression_pays(ratio, codec_bytes_per_s, bytes_per_s):
        return None
    seconds = request.data_size / codec_bytes_per_s
    return TransferStrategy("compressed", chunk, "zstd", ratio, seconds)


def _descriptor(raw: Any) -> MemoryDescriptor:
    if isinstance(raw, MemoryDescriptor):
        return raw
    address, size = read_field(raw, "gpu_addr", "address"), read_field(raw, "size")
    if address is None or size is None:
        raise ValueError(f"{raw!r} has no gpu_addr (or address) and size")
    return MemoryDescriptor(read_field(raw, "device_id", default=0), address, size)
