"""`GPUMemoryOptimizer`: one size of blocks for the KV memory of requests, as a library.

Engines here have blocks of a fixed number of tokens. Programs that allocate memory themselves get a
size by the sizes that they allocate.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.values import read_field
from dynamo.scheduling.router.clustering import cluster_centers

CLUSTERS = 3
MAX_TRACKED = 4096


class PlannedPool(msgspec.Struct, frozen=True):
    """A pool of equal blocks, to be allocated once. Sizes are bytes."""

    block_size: int
    blocks: int

    @property
    def total_size(self) -> int:
        """The bytes of all blocks."""
        return self.block_size * self.blocks


class LayoutEntry(msgspec.Struct, frozen=True):
    """The blocks of an allocation of `size` bytes."""

    first_block: int
    blocks: int
    size: int


class OptimizedLayout(msgspec.Struct, frozen=True):
    """The blocks of all allocations. `expected_fragmentation` is the share of them that no
    allocation uses."""

    block_size: int
    memory_pool: PlannedPool
    layout_plan: tuple[LayoutEntry, ...]
    expected_fragmentation: float


class AllocationTracker:
    """The sizes of the last allocations."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=MAX_TRACKED)

    def record(self, size: int) -> None:
        """Remember an allocation of `size` bytes. Raises `ValueError` for none."""
        if size < 1:
            raise ValueError(f"an allocation has at least 1 byte, not {size}")
        self._sizes.append(size)

    @property
    def allocation_sizes(self) -> Sequence[int]:
        """The sizes, oldest first."""
        return tuple(self._sizes)

    def counts(self) -> Counter[int]:
        """Return how often each size was allocated."""
        return Counter(self._sizes)


class GPUMemoryOptimizer:
    """Finds the size of blocks that fits the allocations of a model and its batches."""

    def __init__(self, config: Any = None) -> None:
        """`config` is kept, and not read."""
        self.config = config
        self.allocation_tracker = AllocationTracker()
        self.memory_pools: dict[int, PlannedPool] = {}
        """The pools that were planned, by the size of their blocks."""

    async def optimize_memory_layout(self, model_config: Any, batch_config: Any) -> OptimizedLayout:
        """Return blocks for the KV memory of a batch, whose sizes are tracked from then on.

        `model_config` has `num_layers`, `num_kv_heads`, `head_dim` and `dtype_bytes` (2), or
        `kv_bytes_per_token`. `batch_config` has `sequence_lengths`, or `batch_size` and
        `max_seq_len`. Both may be objects or mappings. Raises `ValueError` for what is missing.
        """
        per_token = _kv_bytes_per_token(model_config)
        sizes = [length * per_token for length in _lengths(batch_config)]
        for size in sizes:
            self.allocation_tracker.record(size)
        block_size = optimal_block_size(self.allocation_tracker.allocation_sizes)
        plan, first = [], 0
        for size in sizes:
            plan.append(LayoutEntry(first, math.ceil(size / block_size), size))
            first += plan[-1].blocks
        pool = self.memory_pools[block_size] = PlannedPool(block_size, first)
        unused = 1 - sum(sizes) / pool.total_size
        return OptimizedLayout(block_size, pool, tuple(plan), unused)


def optimal_block_size(allocation_sizes: Sequence[int]) -> int:
    """Return the next power of two at or above the largest of three centers of the sizes, which are
    clustered by their logarithms. Raises `ValueError` without sizes."""
    largest = cluster_centers([math.log2(size) for size in allocation_sizes], CLUSTERS)[-1]
    return 1 << max(0, int(2**largest) - 1).bit_length()


def _kv_bytes_per_token(model: Any) -> int:
    if (size := read_field(model, "kv_bytes_per_token")) is not None:
        return int(size)
    heads = read_field(model, "num_kv_heads", "num_key_value_heads", "num_attention_heads")
    values = {
        "num_layers": read_field(model, "num_layers", "num_hidden_layers"),
        "num_kv_heads": heads,
        "head_dim": read_field(model, "head_dim"),
    }
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"model_config has no {', '.join(missing)}")
    return 2 * int(math.prod(values.values())) * int(read_field(model, "dtype_bytes", default=2))


def _lengths(batch: Any) -> Sequence[int]:
    lengths = read_field(batch, "sequence_lengths")
    if lengths is None:
        count, longest = read_field(batch, "batch_size"), read_field(batch, "max_seq_len")
        if not (count and longest):
            raise ValueError("batch_config has no sequence_lengths, nor batch_size and max_seq_len")
        lengths = [longest] * count
    if not lengths:
        raise ValueError("batch_config has no sequences")
    return list(lengths)
