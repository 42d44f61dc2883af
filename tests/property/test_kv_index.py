"""The KV index against a reference dict: worker -> held blocks."""

from __future__ import annotations

import inspect
import random
from collections.abc import Generator
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynamo.scheduling.index.kv_index import Chain, KvIndex

WORKERS = [f"w{number}" for number in range(6)]
workers = st.sampled_from(WORKERS)


class Tree:
    """Chains of blocks. Every prompt is a path; a hash identifies the whole prefix."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[int, ...], int] = {}
        self.parents: dict[int, int] = {}

    def chain(self, path: list[int]) -> list[int]:
        blocks, parent = [], 0
        for end in range(1, len(path) + 1):
            key = tuple(path[:end])
            if key not in self._hashes:
                self._hashes[key] = len(self._hashes) * 977 + 1
                self.parents[self._hashes[key]] = parent
            parent = self._hashes[key]
            blocks.append(parent)
        return blocks


paths = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class IndexMachine(RuleBasedStateMachine):
    """Workers that hold a block only together with the blocks above it, like engines."""

    budget = 1 << 30
    remembers_holes = True

    @initialize()
    def begin(self) -> None:
        self.index = KvIndex(self.budget)
        self.tree = Tree()
        self.truth: dict[str, set[int]] = {worker: set() for worker in WORKERS}
        self.copy: Generator[Chain, None, None] | None = None

    @rule(worker=workers, path=paths, again=st.integers(-1, 12), piece=st.integers(1, 12))
    def store(self, worker: str, path: list[int], again: int, piece: int) -> None:
        """Store a path in events of `piece` blocks from `again` on (-1: from the first new block)."""
        chain = self.tree.chain(path)
        held = self.truth[worker]
        known = sum(block in held for block in chain)
        start = known if again < 0 else min(again, known)
        for at in range(start, len(chain), piece):
            parent = chain[at - 1] if at else 0
            self.index.store(worker, parent, chain[at : at + piece])
        held.update(chain)

    @rule(worker=workers, path=paths, keep=st.integers(0, 12), piece=st.integers(1, 12))
    def remove_below(self, worker: str, path: list[int], keep: int, piece: int) -> None:
        """Remove a subtree, last blocks first, in events of `piece` blocks."""
        order = self.below(worker, path, keep)
        for at in range(0, len(order), piece):
            self.index.remove(worker, order[at : at + piece])
        self.truth[worker].difference_update(order)

    @rule(
        worker=workers, path=paths, keep=st.integers(0, 12), seed=st.randoms(use_true_random=False)
    )
    def remove_in_disorder(
        self, worker: str, path: list[int], keep: int, seed: random.Random
    ) -> None:
        order = self.below(worker, path, keep)
        seed.shuffle(order)
        first = len(order) // 2 if self.remembers_holes else 0
        self.index.remove(worker, order[:first])
        self.index.remove(worker, order[first:])
        self.truth[worker].difference_update(order)

    def below(self, worker: str, path: list[int], keep: int) -> list[int]:
        chain = self.tree.chain(path)
        gone = set(chain[keep : keep + 1])
        for block in sorted(self.tree.parents):
            if self.tree.parents[block] in gone:
                gone.add(block)
        return [block for block in sorted(gone, reverse=True) if block in self.truth[worker]]

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        self.index.remove_worker(worker)
        self.truth[worker].clear()
        if self.copy is not None:
            self.copied.pop(worker, None)
            self.expected.pop(worker, None)

    @rule(steps=st.integers(1, 4))
    def copy_on(self, steps: int) -> None:
        """Continue a copy. A complete copy equals the state at its beginning."""
        if self.copy is None:
            self.copy = self.index.copy()
            self.expected = {worker: self.index.get_blocks(worker) for worker in WORKERS}
            self.copied: dict[str, set[int]] = {worker: set() for worker in WORKERS}
        for _, hashes, holders in islice(self.copy, steps):
            for worker, depth in holders.items():
                if worker in self.copied:
                    self.copied[worker].update(hashes[:depth])
        if inspect.getgeneratorstate(self.copy) == inspect.GEN_CLOSED:
            assert self.copied == self.expected
            self.copy = None

    @rule()
    def sweep(self) -> None:
        for _ in range(50):
            self.index.remove("unknown", ())

    @rule(path=paths)
    def match(self, path: list[int]) -> None:
        chain = self.tree.chain(path)
        expected = {}
        for worker, held in self.truth.items():
            depth = 0
            while depth < len(chain) and chain[depth] in held:
                depth += 1
            if depth:
                expected[worker] = depth
        self.check_match(self.index.match(chain), expected)

    def check_match(self, overlaps: dict[str, int], expected: dict[str, int]) -> None:
        assert overlaps == expected

    @invariant()
    def every_block_is_known(self) -> None:
        for worker, held in self.truth.items():
            assert self.index.get_blocks(worker) == held


class TightMachine(IndexMachine):
    """With a small budget the index holds less, never more, and stays within the budget."""

    budget = 6_000
    remembers_holes = False

    def check_match(self, overlaps: dict[str, int], expected: dict[str, int]) -> None:
        assert all(depth <= expected[worker] for worker, depth in overlaps.items())

    @invariant()
    def every_block_is_known(self) -> None:
        assert self.index.bytes_used <= self.budget
        for worker, held in self.truth.items():
            assert self.index.get_blocks(worker) <= held


class HolesMachine(IndexMachine):
    """Workers that keep blocks below a removed one. Their overlaps may be wrong but do no harm."""

    @rule(worker=workers, path=paths, hole=st.integers(0, 11))
    def make_hole(self, worker: str, path: list[int], hole: int) -> None:
        block = self.tree.chain(path)[hole : hole + 1]
        self.index.remove(worker, block)
        self.truth[worker].difference_update(block)

    def check_match(self, overlaps: dict[str, int], expected: dict[str, int]) -> None:
        assert set(expected) <= set(WORKERS) >= set(overlaps)

    @invariant()
    def every_block_is_known(self) -> None:
        assert self.index.bytes_used <= self.budget


TestIndex = IndexMachine.TestCase
TestTightIndex = TightMachine.TestCase
TestIndexWithHoles = HolesMachine.TestCase
for case in (TestIndex, TestTightIndex, TestIndexWithHoles):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 600),
    st.lists(st.integers(0, 600), max_size=70),
    st.integers(0, 2**64 - 1),
)
def test_depths_of_many_workers(length: int, depths: list[int], seed: int) -> None:
    hashes = [(seed + number * 0x9E3779B97F4A7C15) % 2**64 for number in range(length)]
    index = KvIndex()
    for number, depth in enumerate(depths):
        if depth:
            index.store(f"w{number}", 0, hashes[:depth])
    expected = {f"w{number}": min(depth, length) for number, depth in enumerate(depths) if depth}
    assert index.match(hashes) == expected
