"""The KV index: runs of blocks, found by a flat map from block hash to run.

A chained hash identifies a whole prefix, and a held block implies the blocks above it. A match
therefore walks no tree: it looks up a block, finds by binary search how much of its run the prompt
shares, and looks up the next block. The map contains few blocks, because events begin and end where
a worker's part of a run does. The first block of a run and the last one of each holder (anchors)
suffice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Final

from dynamo.scheduling.index.block_runs import (
    ANCHOR_BYTES,
    COPY_CURSOR,
    HOLDER_BYTES,
    RUN_BLOCK_BYTES,
    RUN_BYTES,
    SWEEP_CURSOR,
    Anchors,
    BlockRun,
    LruBlockRuns,
    match_length,
)
from dynamo.scheduling.index.worker_bitsets import HOLE_BYTES, Holes, WorkerBitsets

DEFAULT_BUDGET_BYTES: Final = 256 << 20
PIECE_OVERHEAD_BYTES: Final = 2 * ANCHOR_BYTES + RUN_BYTES + HOLDER_BYTES
"""Upper bound of the memory of a new run besides its blocks."""

MAX_BLOCKS_PER_EVICTION: Final = 64
RUNS_PER_SWEEP: Final = 8

Chain = tuple[int, Sequence[int], Mapping[str, int]]
"""Parent block, blocks, and worker -> how many of them it holds."""


class KvIndex:
    """The blocks that each worker holds, exact within a memory budget. Not thread-safe.

    The index relies on the invariant of prefix caches: a worker that holds a block holds the blocks
    above it. If a worker breaks the invariant, its overlap may be too large until the blocks below
    the gap are removed, too. Above `budget_bytes` the least recently used branches are evicted from
    their ends, so that overlaps become too small rather than too large.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self._spare_bytes = budget_bytes
        self.block_count = 0
        self.evicted_blocks = 0
        self._anchors = Anchors()
        self._shard_getters = self._anchors.shard_getters
        self._worker_bitsets = WorkerBitsets()
        self._runs = LruBlockRuns()
        self._holes = Holes(budget_bytes)
        self._holder_count = 0
        self._removed_workers = 0
        self._workers_being_swept = 0
        self._copy_number = 0
        self._copied_chains: deque[Chain] | None = None

    def reduce_budget(self, reduction_bytes: int) -> None:
        """Reduce the upper limit of `bytes_used`, which takes effect at the next update."""
        self.budget_bytes -= reduction_bytes
        self._spare_bytes = 0

    @property
    def workers(self) -> Sequence[str]:
        """The workers that have stored blocks and were not removed."""
        return self._worker_bitsets.names

    @property
    def bytes_used(self) -> int:
        """An upper bound of the memory of the index."""
        shared = self._holder_count - self._runs.count
        return (
            RUN_BLOCK_BYTES * self.block_count
            + ANCHOR_BYTES * self._anchors.count
            + RUN_BYTES * self._runs.count
            + HOLDER_BYTES * shared
            + HOLE_BYTES * len(self._holes)
        )

    def store(self, worker: str, parent: int, hashes: Sequence[int]) -> None:
        """Add a chain that `worker` holds. Its first block follows `parent` (0: the root)."""
        bit = self._worker_bitsets.get_or_assign_bit(worker)
        filled = bool(self._holes.workers_by_block) and self._holes.fill(bit, hashes)
        above, position = self._find_run(parent), -1
        if above is not None:
            if above.hashes[-1] != parent:
                position = above.find_next_position(worker, parent)
            elif (
                above.holder_bits == bit and not filled and self._try_extend(above, parent, hashes)
            ):
                self._enforce_budget(PIECE_OVERHEAD_BYTES + RUN_BLOCK_BYTES * len(hashes))
                return
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            run = above
            if run is None or not 0 <= position < len(run.hashes) or run.hashes[position] != block:
                run = self._find_run(block)
                position = -1 if run is None else run.find_position(block)
            if run is None:
                run, count = self._insert(worker, bit, above, parent, hashes[at:])
            else:
                count = match_length(run.hashes, position, hashes, at)
                if position + count > run.get_depth(worker):
                    self._set_depth(run, worker, bit, position + count)
            run.may_repeat_blocks |= filled
            at += count
            above, position, parent = run, -1, hashes[at - 1]
            self._spare_bytes -= PIECE_OVERHEAD_BYTES
        self._enforce_budget(RUN_BLOCK_BYTES * end)

    def remove(self, worker: str, hashes: Sequence[int]) -> None:
        """Remove these blocks, and the blocks below them, from `worker`."""
        bit = self._worker_bitsets.get_bit(worker)
        missed = self._remove_blocks(worker, bit, hashes) if bit else ()
        while missed:
            remaining = self._remove_blocks(worker, bit, missed[::-1])
            if len(remaining) >= len(missed):
                self._holes.add(bit, missed)
                break
            missed = remaining
        self._enforce_budget((ANCHOR_BYTES + HOLE_BYTES) * len(hashes))

    def remove_worker(self, worker: str) -> None:
        """Remove a worker in constant time. Later updates remove its blocks step by step."""
        self._removed_workers |= self._worker_bitsets.remove(worker)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return worker -> blocks of the longest prefix of `hashes` that it holds (> 0 only)."""
        path: list[tuple[int, int, BlockRun]] = []
        getters, by_number = self._shard_getters, self._runs.by_number
        removed = self._removed_workers | self._workers_being_swept
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            number = getters[block & 255](block)
            if number is None:
                break
            run = by_number[number]
            if removed and run.holder_bits & removed and not self._purge_removed_workers(run):
                break
            position = run.find_position(block)
            count = match_length(run.hashes, position, hashes, at)
            path.append((at - position, position + count, run))
            at += count
        if self._holes.workers_by_block and self._apply_holes(path, hashes[:at]):
            return self.match(hashes)
        overlaps: dict[str, int] = {}
        others = -1
        for start, length, run in reversed(path):
            self._runs.touch(run)
            if run.holder_bits & others:
                overlaps = run.merge_overlaps(overlaps, start, length)
                others &= ~run.holder_bits
        return overlaps

    def get_blocks(self, worker: str) -> set[int]:
        """Return all blocks of a worker. The cost is a walk over all runs."""
        bit = self._worker_bitsets.get_bit(worker)
        return {
            block
            for run in self._runs.by_number
            if run.holder_bits & bit
            for block in run.hashes[: run.get_depth(worker)]
        }

    def copy(self) -> Generator[Chain, None, None]:
        """Yield all chains as they are at the first step, roughly in order of last use. A chain may
        precede the one that contains its parent.

        The index may change between steps, because a run is copied before its first change. Only
        one copy may be open at a time.
        """
        self._copy_number += 1
        chains = self._copied_chains = deque()
        self._runs.start_walk(COPY_CURSOR)
        try:
            while True:
                run = self._runs.advance(COPY_CURSOR)
                if run is not None:
                    self._copy_before_change(run)
                while chains:
                    yield chains.popleft()
                if run is None:
                    return
        finally:
            self._copied_chains = None

    def _copy_before_change(self, run: BlockRun) -> None:
        """Add the run to the open copy, if there is one that lacks it."""
        if self._copied_chains is not None and run.last_copy != self._copy_number:
            run.last_copy = self._copy_number
            if chain := self._to_chain(run):
                self._copied_chains.append(chain)

    def _to_chain(self, run: BlockRun) -> Chain | None:
        known, workers = self._worker_bitsets.get_bit, run.holder_bits
        depths = {name: depth for name, depth in run.depths.items() if known(name) & workers}
        return (run.parent, run.hashes[: max(depths.values())], depths) if depths else None

    def _find_run(self, block: int) -> BlockRun | None:
        """Return the run with this anchor, or None."""
        number = self._shard_getters[block & 255](block)
        if number is None:
            return None
        run = self._runs.by_number[number]
        removed = self._removed_workers or self._workers_being_swept
        return None if removed and not self._purge_removed_workers(run) else run

    def _purge_removed_workers(self, run: BlockRun) -> bool:
        """Remove removed workers from the run. Return whether any block remains."""
        removed = run.holder_bits & (self._removed_workers | self._workers_being_swept)
        if removed:
            self._copy_before_change(run)
            for name in self._worker_bitsets.list_members(removed):
                self._holder_count += run.set_depth(name, removed, 0)
            self._truncate(run, run.find_max_depth())
        return len(run.hashes) > 0

    def _try_extend(self, run: BlockRun, parent: int, hashes: Sequence[int]) -> bool:
        """Append the blocks to a run with one holder whose last block is `parent`, if they are new.
        Most events take this path."""
        known = self._runs.child_counts
        if parent in known or not hashes or not known.keys().isdisjoint(hashes):
            return False
        if self._copied_chains is not None:
            self._copy_before_change(run)
        run.append_blocks(hashes)
        self.block_count += len(hashes)
        self._anchors.put(hashes[-1], run.number)
        self._runs.touch(run)
        return True

    def _insert(
        self, worker: str, bit: int, above: BlockRun | None, parent: int, hashes: Sequence[int]
    ) -> tuple[BlockRun, int]:
        """Add blocks of one worker from an unknown first one up to a known one. Return the run that
        contains them, and their number."""
        count = len(hashes)
        if not self._runs.child_counts.keys().isdisjoint(hashes):
            count = 1
            while count < len(hashes) and self._find_run(hashes[count]) is None:
                count += 1
        new = hashes if count == len(hashes) else hashes[:count]
        if above is not None and above.holder_bits == bit and above.hashes[-1] == parent:
            run = above
            self._copy_before_change(run)
            self._runs.touch(run)
            run.append_blocks(new)
        else:
            run = self._runs.create(parent, worker, bit, new)
            run.last_copy = self._copy_number
            self._holder_count += 1
            self._anchors.put(new[0], run.number)
        self.block_count += count
        self._anchors.put(new[-1], run.number)
        return run, count

    def _set_depth(self, run: BlockRun, worker: str, bit: int, depth: int) -> None:
        if self._copied_chains is not None:
            self._copy_before_change(run)
        self._holder_count += run.set_depth(worker, bit, depth)
        if depth:
            self._anchors.put(run.hashes[depth - 1], run.number)

    def _remove_blocks(self, worker: str, bit: int, hashes: Sequence[int]) -> Sequence[int]:
        """Remove blocks at the ends of what `worker` holds. Return the others, and those that may
        be in another run, too."""
        missed: list[int] = []
        at, end = 0, len(hashes)
        while at < end:
            block = hashes[at]
            first, at = at, at + 1
            run = self._find_run(block)
            depth = 0 if run is None else run.get_depth(worker)
            if run is None or not depth:
                missed.append(block)
                continue
            own = run.hashes
            remaining = depth - 1 if own[depth - 1] == block else run.find_position(block)
            if remaining >= depth:
                continue
            more = run.match_tail(remaining, hashes, at)
            remaining, at = remaining - more, at + more
            if self._holes.workers_by_block:
                remaining = self._holes.trim_end(bit, own, remaining)
            removed, in_other_runs = self._reduce_depth(run, worker, bit, remaining)
            missed += in_other_runs
            if run.may_repeat_blocks:
                missed += hashes[first:at]
            elif first + removed < at:
                missed += self._anchors.find_in_other_runs(hashes[first + removed : at], run.number)
        return missed

    def _reduce_depth(
        self, run: BlockRun, worker: str, bit: int, depth: int
    ) -> tuple[int, Sequence[int]]:
        """Reduce a worker's depth. Return the number of blocks without a holder that were removed,
        and those of them that are in another run, too."""
        if run.holder_bits == bit:
            return self._truncate(run, depth)
        last = run.get_depth(worker) == len(run.hashes)
        self._set_depth(run, worker, bit, depth)
        return self._truncate(run, run.find_max_depth()) if last else (0, ())

    def _truncate(self, run: BlockRun, length: int) -> tuple[int, Sequence[int]]:
        """Remove the blocks beyond `length`. Return their number, and those in other runs, too."""
        if length == len(run.hashes):
            return 0, ()
        if self._copied_chains is not None:
            self._copy_before_change(run)
        removed = run.truncate(length)
        in_other_runs = self._anchors.remove(removed, run.number)
        self.block_count -= len(removed)
        if length:
            self._anchors.put(run.hashes[-1], run.number)
        else:
            self._holder_count -= run.holder_count
            self._runs.delete(run)
        return len(removed), in_other_runs

    def _apply_holes(
        self, path: Sequence[tuple[int, int, BlockRun]], hashes: Sequence[int]
    ) -> bool:
        """Reduce the depths of workers with holes on the path. Return whether any changed."""
        changed = False
        for position, workers in self._holes.iter_holes(hashes):
            for start, most, run in path:
                remaining = max(0, position - start)
                if start + most <= position:
                    continue
                for name in self._worker_bitsets.list_members(run.holder_bits & workers):
                    if run.get_depth(name) > remaining:
                        self._spare_bytes -= ANCHOR_BYTES
                        self._reduce_depth(run, name, self._worker_bitsets.get_bit(name), remaining)
                        changed = True
        return changed

    def _evict(self) -> bool:
        """Evict some of the least recently used blocks. Return False when nothing is left."""
        coldest = self._runs.find_coldest(MAX_BLOCKS_PER_EVICTION)
        if coldest is None:
            return False
        self.evicted_blocks += self._truncate(*coldest)[0]
        return True

    def _enforce_budget(self, grown: int) -> None:
        """Evict after a growth of at most `grown` bytes, and continue the sweep of removed
        workers."""
        self._spare_bytes -= grown
        if self._spare_bytes < 0:
            while self.bytes_used > self.budget_bytes and self._evict():
                pass
            self._spare_bytes = self.budget_bytes - self.bytes_used
        if self._workers_being_swept or self._removed_workers:
            self._sweep()

    def _sweep(self) -> None:
        if not self._workers_being_swept:
            self._workers_being_swept, self._removed_workers = self._removed_workers, 0
            self._runs.start_walk(SWEEP_CURSOR)
        for _ in range(RUNS_PER_SWEEP):
            run = self._runs.advance(SWEEP_CURSOR)
            if run is None:
                self._worker_bitsets.recycle_bits(self._workers_being_swept)
                self._holes.remove_workers(self._workers_being_swept)
                self._workers_being_swept = 0
                return
            self._purge_removed_workers(run)
