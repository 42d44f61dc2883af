"""Memory that peers may read: `MemoryRegion`, its description in an instance record, and reads."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event
from typing import Annotated, Final, Self

import msgspec

from dynamo.communication.transfer.layout import KvLayout
from dynamo.communication.transfer.runs import merge_pairs
from dynamo.core.errors import TransferFailed

PAGE_BYTES: Final = 4096
GENERATION_BYTES: Final = 8
MAX_SLOTS: Final = 1 << 32
MAX_READS: Final = 16_384
"""Slots that one thread pulls at a time."""
ANY_GENERATION: Final = (1 << 64) - 1
"""The generation of a read that measures a peer and does not use the bytes."""
PIECE_BYTES: Final = 4 << 20
"""Largest copy at once. A cancelled pull waits for the present one, under a millisecond or two."""
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
    `kv` says it in parts, so that peers can convert blocks.
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

    Subclasses hold slots in the memory of a device: then `slot` and `memory` are for the others,
    and `reading`, `writing` and the copies serve all.

    The owner adds 1 to the generation of a slot when the slot gets a new content's owner, before
    its memory is written again. A peer reads the number before and after a copy and drops a copy
    whose number changed. `generations` is a memoryview of format "Q". `address` is that of
    `memory` in this process. Both lie in one memfd, so that a peer of this host can map them and
    the kernel frees them with the last process. Pages exist from their first use on.
    """

    memory_type = "DRAM"
    device = 0
    """Where the slots lie, in the words of NIXL: "VRAM" and the number of a GPU, or host memory."""

    copy_bytes = 32 << 20
    """A thread copies so many bytes, or one block, before the progress of a load is reported."""

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
            self.address = self.generations_address = 0
            return
        start = memory_offset(slots)
        whole = memoryview(buffer)
        self.generations = whole[: slots * GENERATION_BYTES].cast("Q")
        self.memory = whole[start : start + slots * slot_bytes]
        self.generations_address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.address = self.generations_address + start

    @classmethod
    def allocate(cls, slots: int, slot_bytes: int, *, with_memory: bool = True) -> Self:
        """Make a region. Without memory it has only generations, for the simulated cluster."""
        if not with_memory:
            return cls(slots, slot_bytes, -1, None)
        fd, buffer = allocate_memfd(memory_offset(slots) + slots * slot_bytes)
        return cls(slots, slot_bytes, fd, buffer)

    @property
    def has_memory(self) -> bool:
        """False for a region of generations alone."""
        return self._buffer is not None

    @property
    def peer_slots(self) -> int:
        """The number of slots, from the first one on, that peers may read."""
        return self.slots

    def slot(self, index: int) -> memoryview:
        """Return the memory of one slot."""
        start = index * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    @contextmanager
    def reading(self, slots: Sequence[int]) -> Iterator[list[memoryview]]:
        """Lend host memory with the bytes of slots."""
        yield [self.slot(index) for index in slots]

    @contextmanager
    def writing(self, slots: Sequence[int], *, keeps: bool = False) -> Iterator[list[memoryview]]:
        """Lend host memory whose bytes are in the slots on exit. After an exception these hold
        anything. `keeps`: the memory has the present bytes, as a part of them is written."""
        del keeps
        yield [self.slot(index) for index in slots]

    def copy(self, sources: Sequence[int], targets: Sequence[int], stop: Event) -> None:
        """Copy slots to other slots of this region, in a thread. Returns early when `stop` is
        set. After the return nothing is written."""
        self.copy_from(self.address, sources, targets, stop)

    def copy_from(
        self, address: int, sources: Sequence[int], targets: Sequence[int], stop: Event
    ) -> None:
        """Copy slots that begin at an address of host memory, as `copy` does."""
        size = self.slot_bytes
        limit = max(1, PIECE_BYTES // size)
        for source, target, count in merge_pairs(sources, targets, limit):
            start, end = address + source * size, self.address + target * size
            for offset in range(0, count * size, PIECE_BYTES):
                if stop.is_set():
                    return
                piece = min(PIECE_BYTES, count * size - offset)
                ctypes.memmove(end + offset, start + offset, piece)  # releases the GIL

    def settle(self, slots: Sequence[int]) -> None:
        """Wait, in a thread, until nothing writes to slots any more that was launched before these
        were handed out."""

    def share(self) -> bytes:
        """Describe the slots in the memory of a device to another process of this host. Empty: they
        lie in `fd`."""
        return b""

    def open_shared(self, description: bytes, slots: int) -> CopyShared:
        """Open the `slots` that a peer shares. Raises `TransferFailed`."""
        del description, slots
        text = "the peer's blocks lie in the memory of a device, which this process does not use"
        raise TransferFailed.of("refused", text)

    def discard(self) -> None:
        """Give the memory of all slots back, which then read as zeros. Reads of peers that began
        before fail, because the generations change."""
        for slot in range(self.slots):
            self.generations[slot] += 1
        if self._buffer is not None:
            start = memory_offset(self.slots)
            self._buffer.madvise(mmap.MADV_REMOVE, start, self.slots * self.slot_bytes)

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


CopyShared = Callable[[MemoryRegion, Sequence[int], Sequence[int]], None]
"""Copies slots that a peer shares into slots of a region, in a thread. After the return nothing is
written."""


def allocate_memfd(size: int) -> tuple[int, mmap.mmap]:
    """Return shared memory that peers can map, and never see shrink."""
    fd = os.memfd_create("dynamo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a peer's read cannot meet a missing page
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


def memory_offset(slots: int) -> int:
    """Return where the slots begin in the memfd: after the generations, on a page."""
    return -(-slots * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES
