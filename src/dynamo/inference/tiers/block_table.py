"""`BlockTable`: the blocks of a store by hash and in order of use, in about 50 bytes a block.

`RunTable` adds the object of a shared store that contains each block, `Listing` what it lists.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heappush, heappushpop
from itertools import islice

from dynamo.inference.tiers.object_store import ListedObject

NONE = -1
"""No slot."""
_UNUSED = -2
_MIN_CELLS = 64
MAX_TOUCHED = 4096
"""Blocks of one chain that `touch_chain` marks as used at most."""


class BlockTable:
    """Maps hashes to slots and holds the slots in order of their last use.

    A dict of the same would take 200 bytes a block. `cells` is a hash table with open addressing
    and linear probing that contains slots. `older` and `newer` form a doubly linked list. Slots are
    numbered from 0; arrays grow to the highest slot in use. Not thread-safe.
    """

    def __init__(self) -> None:
        self.hashes = array("Q")
        self.parents = array("Q")
        self.generations = array("Q")
        self._older = array("i")
        self._newer = array("i")
        self._cells = array("i", [NONE]) * _MIN_CELLS
        self._mask = _MIN_CELLS - 1
        self._count = 0
        self._oldest = self._newest = NONE

    def __len__(self) -> int:
        return self._count

    @property
    def slots(self) -> int:
        """The number of slots that were ever in use: all slots in use are below."""
        return len(self.hashes)

    def find(self, block_hash: int) -> int:
        """Return the slot of a block, or `NONE`."""
        cells, mask, hashes = self._cells, self._mask, self.hashes
        cell = block_hash & mask
        while (slot := cells[cell]) >= 0:
            if hashes[slot] == block_hash:
                return slot
            cell = (cell + 1) & mask
        return NONE

    def in_use(self, slot: int) -> bool:
        """Whether a slot holds a block."""
        return slot < len(self._older) and self._older[slot] != _UNUSED

    def insert(self, slot: int, block_hash: int, parent_hash: int, generation: int = 0) -> None:
        """Add a block, as the one used last. Neither its slot nor its hash may be in use."""
        if slot >= len(self.hashes):
            self._grow(slot + 1)
        self.hashes[slot], self.parents[slot] = block_hash, parent_hash
        self.generations[slot] = generation
        self._link_newest(slot)
        self._count += 1
        if 2 * self._count > self._mask:
            self._rebuild_cells(self._count)
        else:
            self._put_cell(slot)

    def insert_all(self, records: Sequence[tuple[int, int, int, int]]) -> None:
        """Add blocks as (slot, hash, parent hash, generation), the one used last at the end."""
        slots = 1 + max((record[0] for record in records), default=-1)
        if slots > self.slots:
            self._grow(slots)
        self._rebuild_cells(self._count + len(records))
        for record in records:
            self.insert(*record)

    def remove(self, slot: int) -> None:
        """Remove the block in a slot that is in use."""
        cells, mask, hashes = self._cells, self._mask, self.hashes
        cell = hashes[slot] & mask
        while cells[cell] != slot:
            cell = (cell + 1) & mask
        after = (cell + 1) & mask
        while (neighbour := cells[after]) >= 0:  # move back what the gap would make unreachable
            if (after - (hashes[neighbour] & mask)) & mask >= (after - cell) & mask:
                cells[cell] = neighbour
                cell = after
            after = (after + 1) & mask
        cells[cell] = NONE
        self._unlink(slot)
        self._older[slot] = _UNUSED
        self._count -= 1

    def touch(self, slot: int, *, is_oldest: bool = False) -> None:
        """Mark a block as the one used last, or as the one unused for longest."""
        if is_oldest:
            self._unlink(slot)
            self._link_oldest(slot)
        elif slot != self._newest:
            self._unlink(slot)
            self._link_newest(slot)

    def touch_chain(self, slots: Sequence[int]) -> None:
        """Mark a chain of blocks and the blocks before it as used, the last block first. A parent
        is then always used later than its children, so that chains are evicted from their tail."""
        for slot in reversed(slots):
            self.touch(slot)
        slot = slots[0] if slots else NONE
        for _ in range(MAX_TOUCHED):
            if slot == NONE or (slot := self.find(self.parents[slot])) == NONE:
                return
            self.touch(slot)

    def oldest(self) -> Iterator[int]:
        """Yield slots in order of use, the longest unused first. Before the next slot is wanted, do
        not change the table; only the yielded slot may be touched."""
        slot = self._oldest
        while slot != NONE:
            following = self._newer[slot]
            yield slot
            slot = following

    def find_victim(self, busy: Container[int], pins: Container[int]) -> int:
        """Return the slot unused for longest that is not `busy` and whose hash is not in `pins`, or
        `NONE`. Pinned blocks on the way count as used now, so that the next search is short."""
        for slot in islice(self.oldest(), self._count):
            if slot not in busy:
                if self.hashes[slot] not in pins:
                    return slot
                self.touch(slot)
        return NONE

    def held_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (parent hash, hash) of all blocks, by slot, also while the table changes."""
        for slot in range(self.slots):
            if self._older[slot] != _UNUSED:
                yield self.parents[slot], self.hashes[slot]

    def records(self) -> list[tuple[int, int, int, int]]:
        """Return all blocks as `insert_all` takes them."""
        hashes, parents, generations = self.hashes, self.parents, self.generations
        return [(slot, hashes[slot], parents[slot], generations[slot]) for slot in self.oldest()]

    def copy(self) -> BlockTable:
        """Return a copy for `records` in another thread."""
        table = BlockTable()
        table.hashes, table.parents = self.hashes[:], self.parents[:]
        table.generations, table._newer = self.generations[:], self._newer[:]
        table._oldest, table._count = self._oldest, self._count
        return table

    def _grow(self, slots: int) -> None:
        missing = slots - len(self.hashes)
        for numbers in (self.hashes, self.parents, self.generations, self._newer):
            numbers.frombytes(bytes(missing * numbers.itemsize))
        self._older.extend([_UNUSED] * missing)

    def _put_cell(self, slot: int) -> None:
        cells, mask = self._cells, self._mask
        cell = self.hashes[slot] & mask
        while cells[cell] >= 0:
            cell = (cell + 1) & mask
        cells[cell] = slot

    def _rebuild_cells(self, blocks: int) -> None:
        """Make room for `blocks` and as many again."""
        size = max(_MIN_CELLS, 4 << blocks.bit_length())
        self._cells = array("i", [NONE]) * size
        self._mask = size - 1
        for slot in self.oldest():
            self._put_cell(slot)

    def _link_newest(self, slot: int) -> None:
        newest = self._newest
        self._older[slot], self._newer[slot] = newest, NONE
        if newest == NONE:
            self._oldest = slot
        else:
            self._newer[newest] = slot
        self._newest = slot

    def _link_oldest(self, slot: int) -> None:
        oldest = self._oldest
        self._older[slot], self._newer[slot] = NONE, oldest
        if oldest == NONE:
            self._newest = slot
        else:
            self._older[oldest] = slot
        self._oldest = slot

    def _unlink(self, slot: int) -> None:
        older, newer = self._older[slot], self._newer[slot]
        if older == NONE:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer == NONE:
            self._newest = older
        else:
            self._older[newer] = older


class RunTable:
    """Maps blocks to the objects that contain them, in about 90 bytes a block. An object is known
    by its name: the hash of its last block. `objects`: name -> the first of its blocks."""

    def __init__(self) -> None:
        self.blocks = BlockTable()
        self.objects: dict[int, int] = {}
        self._names = array("Q")
        self._following = array("i")
        self._free: list[int] = []

    def name_of(self, block_hash: int) -> int | None:
        """Return the name of the object that contains a block, or None if none is known."""
        slot = self.blocks.find(block_hash)
        return None if slot == NONE else self._names[slot]

    def add(self, parent_hash: int, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Add an object. Returns its blocks that no other object has, with their parents."""
        added: list[tuple[int, int]] = []
        name = hashes[-1]
        for block_hash in hashes:
            if self.blocks.find(block_hash) == NONE:
                slot = self._take_slot()
                self._names[slot] = name
                self._following[slot] = self.objects.get(name, NONE)
                self.objects[name] = slot
                self.blocks.insert(slot, block_hash, parent_hash)
                added.append((parent_hash, block_hash))
            parent_hash = block_hash
        return added

    def remove(self, name: int) -> Sequence[int]:
        """Remove an object and return the hashes of the blocks that it alone had."""
        removed: list[int] = []
        slot = self.objects.pop(name, NONE)
        while slot != NONE:
            removed.append(self.blocks.hashes[slot])
            self.blocks.remove(slot)
            self._free.append(slot)
            slot = self._following[slot]
        return removed

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._names.append(0)
        self._following.append(NONE)
        return len(self._names) - 1


class Listing:
    """Collects the pages of a listing. `gone`: the known objects that no page had."""

    def __init__(self, table: RunTable, learnt: set[int], limit: int) -> None:
        """`learnt`: the known objects that others stored. `limit`: how many objects of others
        `newest` returns at most."""
        self.gone = set(table.objects)
        self._table = table
        self._learnt = learnt
        self._limit = limit
        self._newest: list[tuple[float, int]] = []
        self._names, self._sizes, self._times = array("Q"), array("Q"), array("d")

    def add_page(self, page: Iterable[ListedObject]) -> None:
        """Add objects."""
        newest = self._newest
        for key, changed_s, size in page:
            name = _parse_name(key)
            if name is None:
                continue
            self.gone.discard(name)
            self._names.append(name)
            self._sizes.append(size)
            self._times.append(changed_s)
            if name in self._learnt or self._table.name_of(name) is None:
                change = heappush if len(newest) < self._limit else heappushpop
                change(newest, (changed_s, name))

    def newest(self) -> list[int]:
        """Return the names of the newest objects that others stored, the newest first."""
        return [name for _, name in sorted(self._newest, reverse=True)]

    def oldest_above(self, limit_bytes: int) -> list[int]:
        """Return the names of the oldest objects, without which the others take `limit_bytes` at
        most. May be called in another thread."""
        excess = sum(self._sizes) - limit_bytes
        oldest = []
        for index in sorted(range(len(self._names)), key=self._times.__getitem__):
            if excess <= 0:
                break
            oldest.append(self._names[index])
            excess -= self._sizes[index]
        return oldest


def _parse_name(key: str) -> int | None:
    try:
        name = int(key.rpartition("/")[2], 16)
    except ValueError:
        return None
    return name if name < 1 << 64 else None
