"""KV memory: a contiguous area for each running sequence, and blocks for the prefix cache.

    areas   [slot][layer][key, value][kv head][position][head_dim]
    blocks  [block][layer][key, value][kv head][token][head_dim]

Areas reserve address space for the whole context. The kernel adds memory page by page as positions
are written; free slots return their memory when they hold too much. A block is one contiguous piece
that is copied as a whole: attention over gathered pages takes 2 to 8 times as long. Blocks lie in a
region that peers may read, if the system has memory for that (Linux).
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from dynamo.communication.transfer import KvLayout, MemoryRegion
from dynamo.communication.transfer.layout import ELEMENT_BYTES, ElementType
from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Floats

FLOAT_BYTES = 4
MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


class KvShape(msgspec.Struct, frozen=True):
    """The dimensions and the elements of the keys and values of one position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: ElementType = "float32"

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of a key, a value or a weight."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one position over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    def layout(self, model: str, block_tokens: int) -> KvLayout:
        """Describe a block to other workers. `model`: the digest of the weights."""
        heads, dim = self.num_kv_heads, self.head_dim
        return KvLayout(model, block_tokens, self.num_layers, heads, dim, self.dtype)


class KvStorage:
    """Areas for `max_num_seqs` sequences of up to `context_tokens`, and `num_blocks` blocks. The
    `host_blocks` slots that follow in the region belong to the host tier."""

    def __init__(
        self,
        shape: KvShape,
        *,
        max_num_seqs: int,
        context_tokens: int,
        num_blocks: int,
        block_tokens: int,
        host_blocks: int = 0,
    ) -> None:
        import numpy as np

        self.block_tokens = block_tokens
        layers, heads, dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        self._area_bytes = -(-shape.token_bytes * context_tokens // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = _reserve_address_space(self._area_bytes * max_num_seqs)
        floats = np.frombuffer(self._memory, np.float32).reshape(max_num_seqs, -1)
        floats = floats[:, : shape.token_bytes // FLOAT_BYTES * context_tokens]
        self.areas: Floats = floats.reshape(max_num_seqs, layers, 2, heads, context_tokens, dim)
        self.region = allocate_region(num_blocks + host_blocks, shape.token_bytes * block_tokens)
        block_shape = (num_blocks, layers, 2, heads, block_tokens, dim)
        self.blocks: Floats = (
            np.empty(block_shape, np.float32)
            if self.region is None
            else np.frombuffer(self.region.memory, np.float32, math.prod(block_shape)).reshape(
                block_shape
            )
        )
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._used_tokens = [0] * max_num_seqs
        self._free_slot_tokens = 0
        self._free_slot_token_limit = num_blocks * block_tokens // 4

    def allocate_slot(self) -> int:
        """Return the lowest free slot, so that slots in use are neighbours."""
        slot = self._free.pop()
        self._free_slot_tokens -= self._used_tokens[slot]
        return slot

    def free_slot(self, slot: int) -> None:
        """Free the slot of a sequence that has ended."""
        self._free.append(slot)
        self._free.sort(reverse=True)
        self._free_slot_tokens += self._used_tokens[slot]
        if self._free_slot_tokens > self._free_slot_token_limit:
            self._trim_free_slots()

    def mark_used(self, slot: int, length: int) -> None:
        """Record that `slot` will be written up to `length` positions."""
        if length > self._used_tokens[slot]:
            self._used_tokens[slot] = length

    def load_blocks(self, slot: int, blocks: Iterable[int], length: int) -> None:
        """Copy blocks into the first `length` positions of a slot's area, in order."""
        area, size = self.areas[slot], self.block_tokens
        start = 0
        for block in blocks:
            end = min(start + size, length)
            area[:, :, :, start:end] = self.blocks[block][:, :, :, : end - start]
            start = end
        self.mark_used(slot, start)

    def save_blocks(self, slot: int, saves: Iterable[tuple[int, int]], length: int) -> None:
        """Copy parts of a slot's area into blocks: (block index in the sequence, block id). Of the
        last one only the positions before `length` are copied."""
        area, size = self.areas[slot], self.block_tokens
        for index, block in saves:
            start, end = index * size, min((index + 1) * size, length)
            self.blocks[block][:, :, :, : end - start] = area[:, :, :, start:end]

    def discard(self) -> None:
        """Return the memory of all areas and blocks to the kernel. No slot may be in use."""
        size = len(self._used_tokens)
        self._memory.madvise(mmap.MADV_DONTNEED, 0, self._area_bytes * size)
        self._used_tokens, self._free_slot_tokens = [0] * size, 0
        if self.region is not None:
            self.region.discard()

    def _trim_free_slots(self) -> None:
        """Return the memory of free slots to the kernel. Their areas then read as zeros."""
        for slot in self._free:
            if self._used_tokens[slot]:
                self._memory.madvise(mmap.MADV_DONTNEED, slot * self._area_bytes, self._area_bytes)
                self._used_tokens[slot] = 0
        self._free_slot_tokens = 0


def allocate_region(
    num_blocks: int, block_bytes: int, allocate: Callable[[], MemoryRegion] | None = None
) -> MemoryRegion | None:
    """Return memory for blocks that peers may read; None where the system has none. `allocate`
    makes another kind of region with so many blocks in host memory. Raises `ConfigError` if it is
    too much."""
    size = num_blocks * block_bytes
    if size > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        raise _memory_error("memory for KV blocks", size, "num-blocks")
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return allocate() if allocate else MemoryRegion.allocate(num_blocks, block_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise _memory_error("memory for KV blocks", size, "num-blocks") from error


def _memory_error(purpose: str, size: int, flags: str) -> ConfigError:
    return ConfigError(f"cannot allocate {size >> 20} MiB of {purpose}", hint=f"lower --{flags}")


def _reserve_address_space(size: int) -> mmap.mmap:
    """Map address space. Memory is used only where it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        purpose = "address space for running sequences"
        raise _memory_error(purpose, size, "max-num-seqs or --max-model-len") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
