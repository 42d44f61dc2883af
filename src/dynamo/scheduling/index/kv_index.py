"""The KV index: a flat map from block hash to the run of blocks it stands in, by the run's number,
so that the garbage collector has nothing to follow.

A chained hash names a whole prefix, and whoever holds a block holds the blocks above it, so a match
needs no walk: look up the first block, find by halving how much of its run the prompt shares, look
up the next. A run knows how deep each worker holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dynamo.scheduling.index.runs import HOLDER_BYTES, RUN_BLOCK_BYTES, RUN_BYTES, Run, Runs
from dynamo.scheduling.index.worker_sets import WorkerSets

SHARDS: Final = 256
"""Parts of the map. A dict that grows copies itself at once: in parts, each copy is short."""

DEFAULT_BUDGET_BYTES: Final = 256 << 20
BLOCK_BYTES: Final = 108 + RUN_BLOCK_BYTES
"""Upper bound of a block: 48 for its hash, up to 60 for its place in the map just after a part has
grown, and its place in a run."""

EVICT_BLOCKS: Final = 64
SWEEP_RUNS: Final = 8


class KvIndex:
    """Exact as far as it is told, within its budget. Not thread-safe; no clock, no I/O.

    It relies on what prefix caches promise: who holds a block holds those above it. Of a worker
    that breaks this it believes less than it holds. Over `budget_bytes` the coldest branches are
    forgotten, tails first; that, too, errs on the side of less.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self.blocks = 0
        self.evicted = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._gets: list[Callable[[int], int | None]] = [shard.get for shard in self._shards]
        self._sets = WorkerSets()
        self._runs = Runs()
        self._holders = 0
        self._dropped = 0
        self._sweeping = 0

    @property
    def workers(self) -> Sequence[str]:
        """Every worker that has a number."""
        return self._sets.names

    @property
    def bytes_used(self) -> int:
        """An upper bound of the memory that the index takes."""
        shared = self._holders - self._runs.count
        return BLOCK_BYTES * self.blocks + RUN_BYTES * self._runs.count + HOLDER_BYTES * shared

    def number(self, worker: str) -> int:
        """The bit of a worker ("instance" or "instance/rank"), assigned on first use."""
        return self._sets.number(worker)

    def store(self, worker: str, parent: int, hashes: Sequence[int]) -> None:
        """`worker` holds this chain; its first block hangs under `parent` (0: the root)."""
        number = self._sets.number(worker)
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            run = self._run(block)
            if run is None:
                above = hashes[at - 1] if at else parent
                at += self._add(number, above, hashes[at:] if at else hashes)
            else:
                depth = run.depth(number)
                fits = depth < len(run.hashes) and run.hashes[depth] == block
                place = depth if fits else run.place(block)
                count = run.common(place, hashes, at)
                if place + count > depth:
                    self._hold(run, number, place + count)
                at += count
        if self._sweeping or self._dropped:
            self._sweep()
        while self.bytes_used > self.budget_bytes and self._evict():
            pass

    def remove(self, worker: str, hashes: Sequence[int]) -> None:
        """`worker` does not hold these blocks any more, nor what hangs under them."""
        number = self._sets.known_number(worker)
        at, end = 0, len(hashes)
        while number is not None and at < end:
            block = hashes[at]
            at += 1
            run = self._run(block)
            if run is None or not (depth := run.depth(number)):
                continue
            own = run.hashes
            left = depth - 1 if own[depth - 1] == block else run.place(block)
            if left >= depth:
                continue
            while at < end and left and own[left - 1] == hashes[at]:
                left -= 1
                at += 1
            self._hold(run, number, left)
            if depth == len(own):
                self._cut(run, run.deepest())
        if self._sweeping or self._dropped:
            self._sweep()

    def clear(self, worker: str) -> None:
        """`worker` holds nothing."""
        self.drop(worker)

    def drop(self, worker: str) -> None:
        """`worker` is no more. Takes no time: its blocks are forgotten in steps, by and by."""
        self._dropped |= self._sets.drop(worker)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix of `hashes` that it holds (> 0 only)."""
        path: list[tuple[int, int, Run]] = []
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            run = self._run(block)
            if run is None:
                break
            place = run.place(block)
            count = run.common(place, hashes, at)
            path.append((at - place, place + count, run))
            at += count
        found: dict[str, int] = {}
        sets = self._sets
        rest, members = sets.live, sets.members
        for start, most, run in reversed(path):
            self._runs.touch(run)
            for depth, held, names in run.levels(members):
                new = held & rest
                if not new:
                    continue
                rest ^= new
                overlap = start + min(depth, most)
                who = names if new == held else members(new)
                if len(who) == 1:
                    found[who[0]] = overlap
                else:
                    found.update(dict.fromkeys(who, overlap))
        return found

    def holders(self, block: int) -> Sequence[str]:
        """The workers that hold a block."""
        run = self._run(block)
        if run is None:
            return ()
        place = run.place(block)
        levels = run.levels(self._sets.members)
        found = sum(held for depth, held, _ in levels if depth > place)
        return self._sets.members(found & self._sets.live)

    def holds(self, worker: str, block: int) -> bool:
        """Whether `worker` holds a block."""
        run, number = self._run(block), self._sets.known_number(worker)
        return run is not None and number is not None and run.depth(number) > run.place(block)

    def is_held(self, block: int) -> bool:
        """Whether anybody holds a block."""
        return bool(self.holders(block))

    def held(self, worker: str) -> set[int]:
        """Every block of a worker. Walks all runs."""
        number = self._sets.known_number(worker)
        if number is None:
            return set()
        return {block for run in self._runs for block in run.hashes[: run.depth(number)]}

    def chains(self) -> Iterator[tuple[int, Sequence[int], dict[str, int]]]:
        """All that is known as chains: (parent, blocks, worker -> how many of them). A chain may
        come before the one that its parent stands in."""
        for run in self._runs:
            holders = {
                name: depth
                for depth, held, _ in run.levels(self._sets.members)
                for name in self._sets.members(held & self._sets.live)
            }
            if holders:
                yield run.parent, run.hashes[: max(holders.values())], holders

    def _run(self, block: int) -> Run | None:
        name = self._gets[block & 255](block)
        return None if name is None else self._runs.named[name]

    def _add(self, number: int, parent: int, hashes: Sequence[int]) -> int:
        """Blocks of one worker, the first of them new; how many were."""
        run = self._run(parent)
        if run is None or run.hashes[-1] != parent or not _alone(run, number):
            run = self._runs.begin(parent, number)
            self._holders += 1
        else:
            self._runs.touch(run)
        shards, name = self._shards, run.name
        count = 0
        for block in hashes:
            if shards[block & 255].setdefault(block, name) is not name:
                break
            count += 1
        run.hashes.extend(hashes if count == len(hashes) else hashes[:count])
        run.hold(number, len(run.hashes))
        self.blocks += count
        return count

    def _hold(self, run: Run, number: int, depth: int) -> None:
        before = run.holders
        run.hold(number, depth)
        self._holders += run.holders - before

    def _cut(self, run: Run, length: int) -> int:
        """Forget what is beyond `length`; how many blocks."""
        before = run.holders
        gone = run.cut(length)
        for block in gone:
            self._shards[block & 255].pop(block, None)
        self.blocks -= len(gone)
        self._holders += run.holders - before
        if not length:
            self._holders -= run.holders
            self._runs.end(run)
        return len(gone)

    def _evict(self) -> bool:
        """Forget some of what was not used for longest. False: nothing is left."""
        coldest = self._runs.coldest(EVICT_BLOCKS)
        if coldest is None:
            return False
        self.evicted += self._cut(*coldest)
        return True

    def _sweep(self) -> None:
        """A small step towards forgetting who was dropped."""
        if not self._sweeping:
            if not self._dropped:
                return
            self._sweeping, self._dropped = self._dropped, 0
            self._runs.begin_round()
        for _ in range(SWEEP_RUNS):
            run = self._runs.next()
            if run is None:
                self._sets.forget(self._sweeping)
                self._sweeping = 0
                return
            before = run.holders
            run.forget(self._sweeping)
            self._holders += run.holders - before
            if run.deepest() < len(run.hashes):
                self._cut(run, run.deepest())


def _alone(run: Run, number: int) -> bool:
    return run.holders == 1 and run.depth(number) == len(run.hashes)
