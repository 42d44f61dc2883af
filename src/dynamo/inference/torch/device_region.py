"""The KV blocks in the memory of a device as a region, from which peers and tiers copy."""

from __future__ import annotations

import ctypes
import logging
import mmap
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any, Self

import msgspec
import torch

from dynamo.communication.transfer.region import (
    PAGE_BYTES,
    CopyShared,
    MemoryRegion,
    allocate_memfd,
    memory_offset,
)
from dynamo.communication.transfer.runs import merge_pairs
from dynamo.core.errors import DECODE_ERRORS, TransferFailed

log = logging.getLogger(__name__)


class DeviceRegion(MemoryRegion):
    """Slots on a device, then those of the host tier in pinned memory, which peers do not read.

    Copies have streams of their own, one into the device and one out of it, and a thread waits for
    the end of each. A step that has ended has written its keys and values, so copies out wait for
    nothing. Copies in wait for the steps that were launched before the slots were handed out: one
    that is computed ahead may still write to the block of a sequence that has ended.
    """

    memory_type = "VRAM"
    copy_bytes = 128 << 20  # at 50 GB/s the wait for a thread would be a third of 32 MB's time

    def __init__(
        self, blocks: torch.Tensor, slots: int, slot_bytes: int, fd: int, buffer: mmap.mmap
    ) -> None:
        super().__init__(slots, slot_bytes, fd, buffer)
        on_card = blocks.is_cuda
        self._unit = torch.uint8 if slot_bytes % 8 else torch.int64
        """Few large numbers: kernels that copy many slots load one at a time."""
        self._blocks = blocks.view(len(blocks), -1).view(self._unit)
        self._host_blocks = self._view_host(self.memory)
        self.address, self.device = blocks.data_ptr(), blocks.device.index or 0
        self._is_pinned = on_card and len(self.memory) > 0 and self._pin()
        self._api: Any = torch.cuda if on_card else torch.cpu
        self._event_options = {"blocking": True} if on_card else {}  # no thread spins
        self._computing = self._api.current_stream()
        self._settled = array("Q", bytes(self.generations))
        """The generations of the slots when the device was last waited for."""
        self._stream_in, self._stream_out = self._api.Stream(), self._api.Stream()

    @classmethod
    def over(cls, blocks: torch.Tensor, host_slots: int) -> Self:
        """Make a region of `blocks`, whose first dimension is the slot, and of memory for a host
        tier. Called on the thread that computes. Raises `OSError`."""
        slots, slot_bytes = len(blocks) + host_slots, blocks[0].nbytes
        fd, buffer = allocate_memfd(memory_offset(slots) + host_slots * slot_bytes)
        return cls(blocks, slots, slot_bytes, fd, buffer)

    @property
    def peer_slots(self) -> int:
        return len(self._blocks)

    def slot(self, index: int) -> memoryview:
        if index < len(self._blocks):
            raise IndexError(f"slot {index} lies in the memory of a device")
        return super().slot(index - len(self._blocks))

    @contextmanager
    def reading(self, slots: Sequence[int]) -> Iterator[list[memoryview]]:
        staged = self._stage(len(slots))
        self._copy(list(staged), [self._slot(index) for index in slots], self._stream_out)
        yield _bytes_of(staged)

    @contextmanager
    def writing(self, slots: Sequence[int], *, keeps: bool = False) -> Iterator[list[memoryview]]:
        staged, targets = self._stage(len(slots)), [self._slot(index) for index in slots]
        if keeps:
            self._copy(list(staged), targets, self._stream_out)
        yield _bytes_of(staged)
        self.settle(slots)
        self._copy(targets, list(staged), self._stream_in)

    def copy(self, sources: Sequence[int], targets: Sequence[int], stop: Event) -> None:
        if stop.is_set() or not targets:
            return
        stream = self._stream_out
        if targets[0] < len(self._blocks):
            self.settle(targets)
            stream = self._stream_in
        self._copy([*map(self._slot, targets)], [*map(self._slot, sources)], stream)

    def copy_from(
        self, address: int, sources: Sequence[int], targets: Sequence[int], stop: Event
    ) -> None:
        if stop.is_set() or not sources:
            return
        size = (max(sources) + 1) * self.slot_bytes
        memory = memoryview((ctypes.c_char * size).from_address(address))
        self._copy_slots(self._view_host(memory), self, sources, targets)

    def settle(self, slots: Sequence[int]) -> None:
        generations, settled = self.generations, self._settled
        if any(settled[slot] != generations[slot] for slot in slots):
            present = array("Q", bytes(generations))
            event = self._api.Event(**self._event_options)
            event.record(self._computing)
            event.synchronize()
            self._settled = present

    def share(self) -> bytes:
        try:
            shared = self._blocks.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise TransferFailed.of("refused", f"CUDA shares no memory: {error}") from error
        return msgspec.msgpack.encode((self._blocks.storage_offset(), *shared[1:]))

    def open_shared(self, description: bytes, slots: int) -> CopyShared:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        shape = slots, self._blocks.shape[1]
        try:
            offset, handle, size, start, *others = msgspec.msgpack.decode(description)
            counter, counter_offset, event, waits = others
            storage = torch.UntypedStorage, self._unit, self.device, handle, size, start
            blocks = rebuild_cuda_tensor(
                torch.Tensor, shape, (shape[1], 1), offset, *storage, False,
                counter, counter_offset, event, waits,
            )  # fmt: skip
        except (RuntimeError, *DECODE_ERRORS) as error:
            text = f"CUDA opens no memory of the peer: {error}"
            raise TransferFailed.of("refused", text) from error
        return partial(self._copy_slots, blocks)

    def close(self) -> None:
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._host_blocks.data_ptr())
        super().close()

    def _copy_slots(
        self,
        blocks: torch.Tensor,
        region: MemoryRegion,
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Copy `blocks`, [slots, numbers], into slots of this region or of one in host memory."""
        runs = [*merge_pairs(sources, targets, len(blocks))]
        if region is self:
            self.settle(targets)
            into, stream = self._blocks, self._stream_in
        else:
            into, stream = self._view_host(region.memory), self._stream_out
        self._copy(
            [into[target : target + count] for _, target, count in runs],
            [blocks[source : source + count] for source, _, count in runs],
            stream,
        )

    def _copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Any
    ) -> None:
        """Copy tensors on a stream, and wait for it. Nothing is written after the return."""
        if not targets:
            return
        done = self._api.Event(**self._event_options)
        with self._api.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            done.record(stream)
        done.synchronize()

    def _slot(self, index: int) -> torch.Tensor:
        count = len(self._blocks)
        return self._blocks[index] if index < count else self._host_blocks[index - count]

    def _view_host(self, memory: memoryview) -> torch.Tensor:
        """Return the slots in host memory as [slots, numbers]."""
        if not memory:
            return torch.empty(0, self._blocks.shape[1], dtype=self._unit)
        return torch.frombuffer(memory, dtype=self._unit).view(-1, self._blocks.shape[1])

    def _stage(self, count: int) -> torch.Tensor:
        """Return host memory for slots, [slots, numbers], on whole pages and pinned for a card."""
        size = count * self.slot_bytes
        memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, pin_memory=self._blocks.is_cuda)
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + size].view(self._unit).view(count, self._blocks.shape[1])

    def _pin(self) -> bool:
        """Pin the memory of the host tier. Without that its copies are slower."""
        size = len(self.memory)
        error = torch.cuda.cudart().cudaHostRegister(self._host_blocks.data_ptr(), size, 0)
        if int(error):
            fields = {"mb": size >> 20, "cuda_error": int(error)}
            log.warning(
                "the host tier is not pinned: its copies are slow", extra={"fields": fields}
            )
        return not int(error)


def _bytes_of(rows: torch.Tensor) -> list[memoryview]:
    return [memoryview(row.view(torch.uint8).numpy()) for row in rows]
