"""The KV index: runs of blocks, found by a flat map from block hash to run.

A chained hash names a whole prefix, and whoever holds a block holds the blocks above it. So a match
needs no walk: look up the first block, find by halving how much of its run the prompt shares, look
up the next. And the map needs few blocks: events begin and end where somebody's part of a run does,
so the first block of a run and the last that a worker holds of it (anchors) are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Final

from dynamo.scheduling.index.anchors import ANCHOR_BYTES, Anchors
from dynamo.scheduling.index.holes import HOLE_BYTES, Holes
from dynamo.scheduling.index.runs import (
    COPY,
    HOLDER_BYTES,
    RUN_BLOCK_BYTES,
    RUN_BYTES,
    SWEEP,
    Run,
    Runs,
)
from dynamo.scheduling.index.worker_sets import WorkerSets

DEFAULT_BUDGET_BYTES: Final = 256 << 20
GROWTH_BYTES: Final = 2 * ANCHOR_BYTES + RUN_BYTES + HOLDER_BYTES
"""Upper bound of what a piece of a chain takes besides its blocks."""

EVICT_BLOCKS: Final = 64
SWEEP_RUNS: Final = 8

Chain = tuple[int, Sequence[int], Mapping[str, int]]
"""Parent, blocks, worker -> how many of them it holds."""


class KvIndex:
    """Exact as far as it is told, within its budget. Not thread-safe; no clock, no I/O.

    It relies on what prefix caches promise: who holds a block holds those above it. Of a worker
    that breaks this it may believe too much, until what hangs under the gap goes, too. Over
    `budget_bytes` the coldest branches are forgotten, tails first: it errs on the side of less.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._spare = budget_bytes
        self.blocks = 0
        self.evicted = 0
        self._anchors = Anchors()
        self._gets = self._anchors.gets
        self._sets = WorkerSets()
        self._runs = Runs()
        self._holes = Holes(budget_bytes)
        self._holders = 0
        self._dropped = 0
        self._sweeping = 0
        self._copies = 0
        self._kept: deque[Chain] | None = None

    @property
    def budget_bytes(self) -> int:
        """What `bytes_used` stays below."""
        return self._budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._spare = 0

    @property
    def workers(self) -> Sequence[str]:
        """Every worker that was heard of and not dropped."""
        return self._sets.names

    @property
    def bytes_used(self) -> int:
        """An upper bound of the memory that the index takes."""
        shared = self._holders - self._runs.count
        return (
            RUN_BLOCK_BYTES * self.blocks
            + ANCHOR_BYTES * self._anchors.count
            + RUN_BYTES * self._runs.count
            + HOLDER_BYTES * shared
            + HOLE_BYTES * len(self._holes)
        )

    def store(self, worker: str, parent: int, hashes: Sequence[int]) -> None:
        """`worker` holds this chain; its first block hangs under `parent` (0: the root)."""
        bit = self._sets.bit(worker)
        filled = bool(self._holes.workers) and self._holes.fill(bit, hashes)
        above, place = self._run(parent), -1
        if above is not None:
            if above.hashes[-1] != parent:
                place = above.follows(worker, parent)
            elif above.workers == bit and not filled and self._extend(above, parent, hashes):
                self._step(GROWTH_BYTES + RUN_BLOCK_BYTES * len(hashes))
                return
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            run = above
            if run is None or not 0 <= place < len(run.hashes) or run.hashes[place] != block:
                run = self._run(block)
                place = -1 if run is None else run.place(block)
            if run is None:
                run, count = self._add(worker, bit, above, parent, hashes[at:])
            else:
                count = run.common(place, hashes, at)
                if place + count > run.depth(worker):
                    self._hold(run, worker, bit, place + count)
            run.doubtful |= filled
            at += count
            above, place, parent = run, -1, hashes[at - 1]
            self._spare -= GROWTH_BYTES
        self._step(RUN_BLOCK_BYTES * end)

    def remove(self, worker: str, hashes: Sequence[int]) -> None:
        """`worker` does not hold these blocks any more, nor what hangs under them."""
        bit = self._sets.known(worker)
        missed = self._remove(worker, bit, hashes) if bit else ()
        while missed:
            left = self._remove(worker, bit, missed[::-1])
            if len(left) >= len(missed):
                self._holes.add(bit, missed)
                break
            missed = left
        self._step((ANCHOR_BYTES + HOLE_BYTES) * len(hashes))

    def clear(self, worker: str) -> None:
        """`worker` holds nothing."""
        self.drop(worker)

    def drop(self, worker: str) -> None:
        """`worker` is no more. Takes no time: its blocks are forgotten in steps, by and by."""
        self._dropped |= self._sets.drop(worker)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix of `hashes` that it holds (> 0 only)."""
        path: list[tuple[int, int, Run]] = []
        gets, named, gone = self._gets, self._runs.named, self._dropped | self._sweeping
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            name = gets[block & 255](block)
            if name is None:
                break
            run = named[name]
            if gone and run.workers & gone and not self._living(run):
                break
            place = run.place(block)
            count = run.common(place, hashes, at)
            path.append((at - place, place + count, run))
            at += count
        if self._holes.workers and self._mind_holes(path, hashes[:at]):
            return self.match(hashes)
        found: dict[str, int] = {}
        others = -1
        for start, most, run in reversed(path):
            self._runs.touch(run)
            if run.workers & others:
                found = run.merge(found, start, most)
                others &= ~run.workers
        return found

    def spans(self, hashes: Sequence[int]) -> Iterator[tuple[int, Mapping[str, int]]]:
        """Wherever blocks of `hashes` are held, in order: (from, worker -> up to where). Whoever
        holds what is above them does not matter here."""
        at = 0
        while at < len(hashes):
            run = self._run(hashes[at])
            if run is None:
                at += 1
                continue
            place = run.place(hashes[at])
            count = run.common(place, hashes, at)
            depths = run.depths.items()
            yield at, {name: at + min(held - place, count) for name, held in depths if held > place}
            at += count

    def held(self, worker: str) -> set[int]:
        """Every block of a worker. Walks all runs."""
        bit = self._sets.known(worker)
        return {
            block
            for run in self._runs
            if run.workers & bit
            for block in run.hashes[: run.depth(worker)]
        }

    def chains(self) -> Iterator[Chain]:
        """All that is known. A chain may come before the one that its parent stands in."""
        return filter(None, map(self._chain, self._runs))

    def copy(self) -> Generator[Chain, None, None]:
        """All that is known when the first is taken, about in the order of last use. Between two
        steps the index may change: what is to change is copied before. One copy at a time."""
        self._copies += 1
        kept = self._kept = deque()
        self._runs.begin_round(COPY)
        try:
            while True:
                run = self._runs.next(COPY)
                if run is not None:
                    self._keep(run)
                while kept:
                    yield kept.popleft()
                if run is None:
                    return
        finally:
            self._kept = None

    def _keep(self, run: Run) -> None:
        """It is about to change, or its turn has come."""
        if self._kept is not None and run.copied != self._copies:
            run.copied = self._copies
            if chain := self._chain(run):
                self._kept.append(chain)

    def _chain(self, run: Run) -> Chain | None:
        known, workers = self._sets.known, run.workers
        depths = {name: depth for name, depth in run.depths.items() if known(name) & workers}
        return (run.parent, run.hashes[: max(depths.values())], depths) if depths else None

    def _run(self, block: int) -> Run | None:
        """The run that has this anchor."""
        name = self._gets[block & 255](block)
        if name is None:
            return None
        run = self._runs.named[name]
        if (self._dropped or self._sweeping) and not self._living(run):
            return None
        return run

    def _living(self, run: Run) -> bool:
        """Whether it is still there when those dropped are forgotten."""
        gone = run.workers & (self._dropped | self._sweeping)
        if gone:
            self._keep(run)
            for name in self._sets.members(gone):
                self._holders += run.hold(name, gone, 0)
            self._cut(run, run.deepest())
        return len(run.hashes) > 0

    def _extend(self, run: Run, parent: int, hashes: Sequence[int]) -> bool:
        """Whether these blocks are simply more of a run that one worker holds and `parent` ends:
        most events."""
        known = self._runs.children
        if parent in known or not hashes or not known.keys().isdisjoint(hashes):
            return False
        if self._kept is not None:
            self._keep(run)
        run.grow(hashes)
        self.blocks += len(hashes)
        self._anchors.put(hashes[-1], run.name)
        self._runs.touch(run)
        return True

    def _add(
        self, worker: str, bit: int, above: Run | None, parent: int, hashes: Sequence[int]
    ) -> tuple[Run, int]:
        """Blocks of one worker, the first of them unknown, up to one that is known: the run in
        which they stand now, and how many they are."""
        count = len(hashes)
        if not self._runs.children.keys().isdisjoint(hashes):
            count = 1
            while count < len(hashes) and self._run(hashes[count]) is None:
                count += 1
        new = hashes if count == len(hashes) else hashes[:count]
        if above is not None and above.workers == bit and above.hashes[-1] == parent:
            run = above
            self._keep(run)
            self._runs.touch(run)
            run.grow(new)
        else:
            run = self._runs.begin(parent, worker, bit, new)
            run.copied = self._copies
            self._holders += 1
            self._anchors.put(new[0], run.name)
        self.blocks += count
        self._anchors.put(new[-1], run.name)
        return run, count

    def _hold(self, run: Run, worker: str, bit: int, depth: int) -> None:
        if self._kept is not None:
            self._keep(run)
        self._holders += run.hold(worker, bit, depth)
        if depth:
            self._anchors.put(run.hashes[depth - 1], run.name)

    def _remove(self, worker: str, bit: int, hashes: Sequence[int]) -> Sequence[int]:
        """Those that stand nowhere at the end of what `worker` holds, or perhaps elsewhere, too."""
        missed: list[int] = []
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            first, at = at, at + 1
            run = self._run(block)
            depth = 0 if run is None else run.depth(worker)
            if run is None or not depth:
                missed.append(block)
                continue
            own = run.hashes
            left = depth - 1 if own[depth - 1] == block else run.place(block)
            if left >= depth:
                continue
            more = run.tail(left, hashes, at)
            left, at = left - more, at + more
            if self._holes.workers:
                left = self._holes.end(bit, own, left)
            gone, elsewhere = self._shrink(run, worker, bit, left)
            missed += elsewhere
            if run.doubtful:
                missed += hashes[first:at]
            elif first + gone < at:
                missed += self._anchors.others(hashes[first + gone : at], run.name)
        return missed

    def _shrink(self, run: Run, worker: str, bit: int, depth: int) -> tuple[int, Sequence[int]]:
        """`worker` holds less of it than before. Of what nobody holds now, tails first: how many
        blocks, and those that stand elsewhere, too."""
        if run.workers == bit:
            return self._cut(run, depth)
        last = run.depth(worker) == len(run.hashes)
        self._hold(run, worker, bit, depth)
        return self._cut(run, run.deepest()) if last else (0, ())

    def _cut(self, run: Run, length: int) -> tuple[int, Sequence[int]]:
        """Forget what is beyond `length`: how many blocks, and those that stand elsewhere, too."""
        if length == len(run.hashes):
            return 0, ()
        if self._kept is not None:
            self._keep(run)
        gone = run.cut(length)
        elsewhere = self._anchors.drop(gone, run.name)
        self.blocks -= len(gone)
        if length:
            self._anchors.put(run.hashes[-1], run.name)
        else:
            self._holders -= run.holders
            self._runs.end(run)
        return len(gone), elsewhere

    def _mind_holes(self, path: Sequence[tuple[int, int, Run]], hashes: Sequence[int]) -> bool:
        """Whether somebody on the path of these blocks turned out to hold less."""
        found = False
        for place, workers in self._holes.along(hashes):
            for start, most, run in path:
                left = max(0, place - start)
                if start + most <= place:
                    continue
                for name in self._sets.members(run.workers & workers):
                    if run.depth(name) > left:
                        self._spare -= ANCHOR_BYTES
                        self._shrink(run, name, self._sets.known(name), left)
                        found = True
        return found

    def _evict(self) -> bool:
        """Forget some of what was not used for longest. False: nothing is left."""
        coldest = self._runs.coldest(EVICT_BLOCKS)
        if coldest is None:
            return False
        self.evicted += self._cut(*coldest)[0]
        return True

    def _step(self, grown: int) -> None:
        """After a change that took at most `grown` bytes: back below the budget, and on with
        forgetting who was dropped."""
        self._spare -= grown
        if self._spare < 0:
            while self.bytes_used > self._budget_bytes and self._evict():
                pass
            self._spare = self._budget_bytes - self.bytes_used
        if self._sweeping or self._dropped:
            self._sweep()

    def _sweep(self) -> None:
        if not self._sweeping:
            self._sweeping, self._dropped = self._dropped, 0
            self._runs.begin_round(SWEEP)
        for _ in range(SWEEP_RUNS):
            run = self._runs.next(SWEEP)
            if run is None:
                self._sets.forget(self._sweeping)
                self._holes.forget(self._sweeping)
                self._sweeping = 0
                return
            self._living(run)
