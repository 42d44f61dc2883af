"""`DiskTier`: KV blocks in a folder on a local disk, reused after a crash or a restart.

    PATH/<digest of the layout>-<part>/blocks    slots, see `slot_file`
    PATH/<digest of the layout>-<part>/index     hints for a quick start, see `slot_index`

Each worker locks one part; a restarted one takes the first that is free. Nothing is ever synced:
what a crash damages does not match its checksum when it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Final, Self

import msgspec

from dynamo.communication.transfer import MemoryRegion
from dynamo.communication.transfer.estimate import LoadEstimate
from dynamo.core.clock import Clock
from dynamo.core.errors import TransferFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import Tier
from dynamo.inference.tiers.block_table import NONE, BlockTable
from dynamo.inference.tiers.codecs import BlockCodec, CorruptBlock
from dynamo.inference.tiers.copy_pool import CopyPool
from dynamo.inference.tiers.disk_part import DiskPart
from dynamo.inference.tiers.resident_blocks import SlotTier, TierSlots
from dynamo.inference.tiers.slot_index import IndexRecord
from dynamo.inference.tiers.tier import MeasuredTier, TierBlock

log = logging.getLogger(__name__)

LOAD_THREADS: Final = 8
STORE_THREADS: Final = 2
RETRY_S: Final = 60.0
"""Time for which a disk that failed is not used."""
READ_FAILURES: Final = 3
"""Failed reads in a row after which the disk is not read for a while."""
INITIAL_LATENCY_S: Final = 1e-3
INITIAL_BYTES_PER_S: Final = 500e6
SCANNED_AT_ONCE: Final = 256
"""Slots whose headers are read between two changes of the index."""


class _Write(msgspec.Struct):
    """A block on its way into a slot of the disk."""

    block: TierBlock
    slot: int
    generation: int
    written: bool = False

    @property
    def record(self) -> IndexRecord:
        return self.slot, self.block.block_hash, self.block.parent_hash, self.generation


class DiskTier(SlotTier, MeasuredTier):
    """Holds blocks of the layout of `region` on a local disk, the least recently used leave."""

    name: Tier = "disk"

    def __init__(self, part: DiskPart, block_bytes: int, clock: Clock) -> None:
        estimate = LoadEstimate(INITIAL_LATENCY_S, INITIAL_BYTES_PER_S)
        super().__init__(block_bytes, clock, estimate)
        self.capacity_blocks = part.slots
        self.slots = TierSlots("disk", part.slots, clock)
        self.folder = part.folder
        self._part = part
        self._storing: set[int] = set()
        self._load_pool = CopyPool("kv-disk-load", LOAD_THREADS)
        self._store_pool = CopyPool("kv-disk-store", STORE_THREADS)
        self._index_pool = CopyPool("kv-disk-index", 1)
        self._tasks = BackgroundTasks()
        self._problem = ""
        self._read_failures = 0
        self._writable_at_s = self._readable_at_s = 0.0
        self._is_scanning = self._is_closing = False
        self._generations = count(1)

    @classmethod
    async def open(
        cls,
        path: str | Path,
        region: MemoryRegion,
        capacity_bytes: int,
        layout: str,
        clock: Clock,
        codec: BlockCodec | None = None,
    ) -> Self:
        """Lock a folder under `path` for blocks of `layout` and read its index. A lost index is
        rebuilt in the background. Raises `ConfigError`."""
        block_codec = codec or BlockCodec(region.slot_bytes)

        def open_part() -> tuple[DiskPart, BlockTable]:
            part = DiskPart(Path(path).expanduser(), region, capacity_bytes, layout, block_codec)
            table = BlockTable()
            table.insert_all(part.records or ())
            return part, table

        part, table = await clock.offload(open_part)
        tier = cls(part, region.slot_bytes, clock)
        tier._adopt(table)
        if part.records is None:
            tier._is_scanning = True
            tier._tasks.start(tier._scan(), "read the headers of KV blocks on disk")
        part.records = None
        return tier

    def _adopt(self, table: BlockTable) -> None:
        self.slots.adopt(table)
        self._generations = count(1 + max(table.generations, default=0))

    @property
    def problem(self) -> str:
        now = self._clock.now()
        return self._problem if now < max(self._writable_at_s, self._readable_at_s) else ""

    @property
    def is_readable(self) -> bool:
        return self._clock.now() >= self._readable_at_s

    async def load(self, blocks: Sequence[TierBlock], on_loaded: Callable[[int], None]) -> None:
        slots = self._find_slots(blocks)
        self.slots.table.touch_chain(slots)
        for slot in slots:
            self.slots.begin_read(slot)

        def read(number: int) -> None:
            self._part.read_block(slots[number], blocks[number])

        load = self.measure_load(len(slots), on_loaded)
        try:
            with load:
                await self._load_pool.run(len(slots), read, load.report)
            self._read_failures = 0
        except CorruptBlock as error:
            self.counters.corrupt_blocks += 1
            self._remove(slots[load.loaded], blocks[load.loaded].block_hash)
            raise TransferFailed.of("checksum", f"a block on disk is void: {error}") from error
        except OSError as error:
            self._on_read_error(error, slots[load.loaded], blocks[load.loaded].block_hash)
            text = f"a block on disk cannot be read: {error.strerror}"
            raise TransferFailed.of("gone", text) from error
        finally:
            for slot in slots:
                self.slots.end_read(slot)
        if len(slots) < len(blocks):
            raise TransferFailed.of("gone", "a block left the disk meanwhile")

    def _find_slots(self, blocks: Sequence[TierBlock]) -> list[int]:
        if not self.is_readable:
            raise TransferFailed.of("refused", self._problem)
        slots: list[int] = []
        for block in blocks:
            slot = self.slots.table.find(block.block_hash)
            if slot == NONE:
                break
            slots.append(slot)
        if not slots:
            raise TransferFailed.of("gone", "the blocks are not on the disk any more")
        return slots

    async def store(self, blocks: Sequence[TierBlock]) -> int:
        writes = self._choose_writes(blocks)
        if not writes:
            return 0

        def write(number: int) -> None:
            item = writes[number]
            item.written = self._part.write_block(item.slot, item.generation, item.block)

        stored: list[_Write] = []
        clears = self.clears
        try:
            await self._store_pool.run(len(writes), write)
            written = [item for item in writes if item.written]
            records = [item.record for item in written]
            if clears == self.clears:
                await self._run_on_index(partial(self._part.index.append, records))
            stored = written if clears == self.clears else []
        except OSError as error:
            self._on_write_error(error)
        finally:
            self._finish_writes(writes, stored)
        if self._part.index.needs_rewrite(self.blocks):
            await self._rewrite_index()
        return len(stored)

    def _choose_writes(self, blocks: Sequence[TierBlock]) -> list[_Write]:
        writes: list[_Write] = []
        if self._is_scanning or self._clock.now() < self._writable_at_s:
            return writes
        for block in blocks:
            block_hash = block.block_hash
            if block_hash in self.slots or block_hash in self._storing:
                continue
            if not (reserved := self.slots.reserve(1)):
                break
            self._storing.add(block_hash)
            writes.append(_Write(block, reserved[0], next(self._generations)))
        self.counters.evicted_blocks = self.slots.evicted_blocks
        return writes

    def _finish_writes(self, writes: Sequence[_Write], stored: Sequence[_Write]) -> None:
        slots, table = {item.slot for item in stored}, self.slots.table
        for item in writes:
            self._storing.remove(item.block.block_hash)
            if item.slot in slots:
                table.insert(*item.record)
                self.slots.events.add_stored(item.block.parent_hash, item.block.block_hash)
            else:
                self.slots.release([item.slot])
        parents = {item.block.parent_hash for item in stored}
        for item in stored:
            if item.block.block_hash not in parents:
                table.touch_chain([item.slot])
        self.counters.stored_blocks += len(stored)

    async def _run_on_index(self, work: Callable[[], None]) -> None:
        await self._index_pool.run(1, lambda _: work())

    async def _rewrite_index(self) -> None:
        table = self.slots.table.copy()
        try:
            await self._run_on_index(lambda: self._part.index.rewrite(table.records()))
        except OSError as error:
            self._on_write_error(error)

    async def _scan(self) -> None:
        """Find the blocks of a lost index by their headers."""
        records: list[IndexRecord] = []
        clears = self.clears
        try:
            for first in range(0, self.capacity_blocks, SCANNED_AT_ONCE):
                end = min(first + SCANNED_AT_ONCE, self.capacity_blocks)
                await self._run_on_index(lambda: records.extend(self._part.scan(first, end)))  # noqa: B023 awaited
                if clears != self.clears or self._is_closing:
                    break
                for record in records:
                    self._add_scanned(record)
                records.clear()
        except OSError as error:
            self._on_write_error(error)
        if not self._is_closing:
            self._adopt(self.slots.table)
            await self._rewrite_index()
        self._is_scanning = False

    def _add_scanned(self, record: IndexRecord) -> None:
        slot, block_hash, parent_hash, generation = record
        table = self.slots.table
        other = table.find(block_hash)
        if other != NONE:
            if table.generations[other] > generation:
                return
            table.remove(other)
        else:
            self.slots.events.add_stored(parent_hash, block_hash)
        table.insert(slot, block_hash, parent_hash, generation)

    def _remove(self, slot: int, block_hash: int) -> None:
        """Remove a block that cannot be loaded."""
        if self.slots.table.find(block_hash) == slot:
            self.slots.remove(slot)

    def _on_read_error(self, error: OSError, slot: int, block_hash: int) -> None:
        self.counters.failures += 1
        self._read_failures += 1
        self._remove(slot, block_hash)
        if self._read_failures >= READ_FAILURES:
            self._read_failures = 0
            self._readable_at_s = self._writable_at_s = self._clock.now() + RETRY_S
            self._set_problem("cannot be read", error)

    def _on_write_error(self, error: OSError) -> None:
        self.counters.failures += 1
        self._writable_at_s = self._clock.now() + RETRY_S
        self._set_problem("takes no KV blocks", error)

    def _set_problem(self, what: str, error: OSError) -> None:
        self._problem = (
            f"{self.folder} {what}: {error.strerror or error}; check the disk and its free space "
            f"(tried again after {RETRY_S:.0f} s)"
        )
        log.warning("KV tier", extra={"fields": {"problem": self._problem}})

    def _remove_all(self) -> Sequence[int]:
        hashes = self.slots.remove_all()
        self._tasks.start(self._rewrite_index(), "empty the index of KV blocks on disk")
        return hashes

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._writable_at_s = self._readable_at_s = inf
        await self._tasks.join()
        for pool in (self._load_pool, self._store_pool, self._index_pool):
            await pool.close()
        await self._clock.offload(self._part.close)
