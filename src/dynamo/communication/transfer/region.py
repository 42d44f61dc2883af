"""Memory that peers may read: `MemoryRegion`, its description in an instance record, and reads."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from array import array
from contextlib import suppress
from typing import Annotated, Final, Self

import msgspec

from dynamo.communication.transfer.layout import KvLayout

PAGE_BYTES: Final = 4096
GENERATION_BYTES: Final = 8
MAX_SLOTS: Final = 1 << 32
MAX_READS: Final = 16_384
"""Slots that one thread pulls at a time."""
ANY_GENERATION: Final = (1 << 64) - 1
"""The generation of a read that measures a peer and does not use the bytes."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SlotRead(msgspec.Struct, frozen=True, array_like=True):
    """A slot to pull: slot `source` of the peer, while its number is `generation`, goes into slot
    `target` of this process's region.

    Where both ends have blocks of different lengths, a read is a piece of both: from token
    `source_token` of the source, to token `target_token` of the target, as much as both have.
    """

    source: int
    generation: int
    target: int
    source_token: int = 0
    target_token: int = 0


class RegionDescriptor(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data by which a peer pulls from a region. The owner puts it into its instance record.

    `layout` names everything that both ends must agree on: model, type and shape of the blocks.
    `kv` says it in parts, so that peers can convert blocks; former versions do not know it.
    `endpoints` are URLs by preference. `incarnation` identifies the process: another
    process that has its address later is another peer.
    """

    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]
    layout: str
    endpoints: tuple[str, ...]
    incarnation: str
    kv: KvLayout | None = None

    def refusal(self, own: RegionDescriptor) -> str:
        """Say why blocks of this region cannot be pulled into `own`; "" if they can."""
        if (self.layout, self.slot_bytes) == (own.layout, own.slot_bytes):
            return ""
        if self.kv is not None and own.kv is not None:
            if self.kv.block_bytes != self.slot_bytes:
                return f"the peer's slots of {self.slot_bytes} bytes are not {self.kv.block_bytes}"
            same = ("parts", "part")  # a pull takes all heads from one peer
            return self.kv.refusal(own.kv) or self.kv.difference(own.kv, same)
        return (
            f"the blocks of the peer have layout {self.layout} with {self.slot_bytes} bytes, those "
            f"here {own.layout} with {own.slot_bytes}"
        )


class MemoryRegion:
    """`slots` pieces of memory of `slot_bytes` each, and a generation number for each slot.

    The owner adds 1 to the generation of a slot when the slot gets a new content's owner, before
    its memory is written again. A peer reads the number before and after a copy and drops a copy
    whose number changed. `generations` is a memoryview of format "Q". `address` is that of
    `memory` in this process. Both lie in one memfd, so that a peer of this host can map them and
    the kernel frees them with the last process. Pages exist from their first use on.
    """

    memory_type = "DRAM"
    device = 0
    """Where the slots lie, in the words of NIXL: "VRAM" and the number of a GPU, or host memory."""

    kv_layout: KvLayout | None = None
    """Set by an engine whose blocks other workers may convert."""

    def __init__(self, slots: int, slot_bytes: int, fd: int, buffer: mmap.mmap | None) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.fd = fd
        self._buffer = buffer
        self._users = 0
        self._closed = False
        if buffer is None:
            self.generations = memoryview(array("Q", [0]) * slots)
            self.memory = memoryview(bytearray())
            self.address = 0
            return
        start = memory_offset(slots)
        whole = memoryview(buffer)
        self.generations = whole[: slots * GENERATION_BYTES].cast("Q")
        self.memory = whole[start : start + slots * slot_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + start

    @classmethod
    def allocate(cls, slots: int, slot_bytes: int, *, with_memory: bool = True) -> Self:
        """Make a region. Without memory it has only generations, for the simulated cluster."""
        if not with_memory:
            return cls(slots, slot_bytes, -1, None)
        size = memory_offset(slots) + slots * slot_bytes
        fd = os.memfd_create("dynamo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a peer's read cannot meet a missing page
            return cls(slots, slot_bytes, fd, mmap.mmap(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @property
    def has_memory(self) -> bool:
        """False for a region of generations alone."""
        return self._buffer is not None

    def slot(self, index: int) -> memoryview:
        """Return the memory of one slot."""
        start = index * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    def keep(self) -> None:
        """Keep the memory until `release`: threads of a plane use its address."""
        self._users += 1

    def release(self) -> None:
        """End what `keep` began."""
        self._users -= 1
        self._unmap_if_unused()

    def close(self) -> None:
        """Give the memory back when no plane uses it. Arrays over `memory` keep it, too."""
        self._closed = True
        self._unmap_if_unused()

    def _unmap_if_unused(self) -> None:
        if self._users or not self._closed:
            return
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        with suppress(BufferError):
            self.generations.release()
            self.memory.release()
            if self._buffer is not None:
                self._buffer.close()


def memory_offset(slots: int) -> int:
    """Return where the slots begin in the memfd: after the generations, on a page."""
    return -(-slots * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES
