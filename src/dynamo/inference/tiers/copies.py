"""Copies between the slots of an engine's blocks and the slots of a tier in memory."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event

from dynamo.communication.transfer import MemoryRegion
from dynamo.communication.transfer.estimate import LoadEstimate
from dynamo.communication.transfer.threads import CopyThreads
from dynamo.core.clock import Clock
from dynamo.inference.tiers.tier import MeasuredLoad

INITIAL_BYTES_PER_S = 4e9
INITIAL_LATENCY_S = 1e-4

Pair = tuple[int, int]
"""A slot of the engine's blocks, and a slot of the tier."""


class BlockCopies(ABC):
    """Moves blocks of one tier. Loads and stores do not delay each other. `first_slot`: the tier's
    slot 0 in the region of the engine's blocks; -1: the tier has no slots there."""

    first_slot: int = -1

    @abstractmethod
    async def store(self, pairs: Sequence[Pair]) -> None:
        """Copy blocks into the tier. After a cancellation nothing is written any more."""

    @abstractmethod
    async def load(self, pairs: Sequence[Pair], on_loaded: Callable[[int], None]) -> None:
        """Copy blocks out of the tier and report how many are there. After a cancellation nothing
        is written any more."""

    @abstractmethod
    def predict_load_s(self, blocks: int) -> float:
        """Predict the seconds of a load that starts now."""

    @abstractmethod
    def close(self) -> None:
        """Release threads."""


class RegionCopies(BlockCopies):
    """Copies within one region: the tier's slot 0 is `first_slot` there. `clock` measures."""

    def __init__(self, region: MemoryRegion, first_slot: int, clock: Clock) -> None:
        self._region = region
        self.first_slot = first_slot
        self._clock = clock
        self._threads = CopyThreads("kv-tier", 2)
        self._estimate = LoadEstimate(INITIAL_LATENCY_S, INITIAL_BYTES_PER_S)
        self._blocks_per_copy = max(1, region.copy_bytes // region.slot_bytes)
        region.keep()

    async def store(self, pairs: Sequence[Pair]) -> None:
        first = self.first_slot
        await self._copy([slot for slot, _ in pairs], [first + at for _, at in pairs])

    async def load(self, pairs: Sequence[Pair], on_loaded: Callable[[int], None]) -> None:
        size = self._region.slot_bytes
        with MeasuredLoad(self._estimate, self._clock, size, len(pairs), on_loaded) as load:
            for start in range(0, len(pairs), self._blocks_per_copy):
                part = pairs[start : start + self._blocks_per_copy]
                sources = [self.first_slot + at for _, at in part]
                await self._copy(sources, [slot for slot, _ in part])
                load.report(start + len(part))

    def predict_load_s(self, blocks: int) -> float:
        self._estimate.forget_old(self._clock.now())
        return self._estimate.predict_s(blocks * self._region.slot_bytes)

    def close(self) -> None:
        self._threads.close()
        self._region.release()

    async def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        stop = Event()
        await self._threads.run(partial(self._region.copy, sources, targets, stop), stop.set)


class CopyLink:
    """A way on which copies wait in line, in the time of a clock. Tiers may share one."""

    def __init__(self, clock: Clock, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.clock = clock
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._free_at_s = 0.0

    def predict_s(self, size_bytes: int) -> float:
        """Compute the seconds of a copy that starts now."""
        waiting_s = max(0.0, self._free_at_s - self.clock.now())
        return waiting_s + size_bytes / self.bytes_per_s + self.latency_s

    def reserve(self, size_bytes: int) -> float:
        """Take the next free time for a copy, and return when it ends."""
        start_s = max(self.clock.now(), self._free_at_s)
        self._free_at_s = start_s + size_bytes / self.bytes_per_s
        return self._free_at_s

    async def carry(self, size_bytes: int) -> None:
        """Wait for the end of a copy. A cancelled last one gives the rest of its time back."""
        start_s = max(self.clock.now(), self._free_at_s)
        end_s = self.reserve(size_bytes)
        try:
            await self.clock.sleep_until(end_s + self.latency_s)
        except asyncio.CancelledError:
            if self._free_at_s == end_s:
                self._free_at_s = max(start_s, min(self.clock.now(), end_s))
            raise


class TimedCopies(BlockCopies):
    """Takes the time of two links. The bytes, if `region` has memory, are kept in `contents` by
    slot.

    `catch_up` brings the engine's blocks to the present time when a copy out of them ends.
    """

    def __init__(
        self,
        region: MemoryRegion,
        loads: CopyLink,
        stores: CopyLink,
        contents: dict[int, bytes],
        catch_up: Callable[[], None],
    ) -> None:
        self._region = region
        self._loads = loads
        self._stores = stores
        self._catch_up = catch_up
        self._contents = contents

    async def store(self, pairs: Sequence[Pair]) -> None:
        region = self._region
        await self._stores.carry(len(pairs) * region.slot_bytes)
        self._catch_up()
        if region.has_memory:
            for slot, at in pairs:
                self._contents[at] = bytes(region.slot(slot))

    async def load(self, pairs: Sequence[Pair], on_loaded: Callable[[int], None]) -> None:
        region = self._region
        await self._loads.carry(len(pairs) * region.slot_bytes)
        if region.has_memory:
            for slot, at in pairs:
                region.slot(slot)[:] = self._contents[at]
        on_loaded(len(pairs))

    def predict_load_s(self, blocks: int) -> float:
        return self._loads.predict_s(blocks * self._region.slot_bytes)

    def close(self) -> None:
        """Do nothing: tiers may share the contents."""
