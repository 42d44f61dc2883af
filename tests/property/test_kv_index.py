"""The index against a plain dict: worker -> blocks held."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynamo.scheduling.index.kv_index import KvIndex

WORKERS = [f"w{number}" for number in range(6)]
workers = st.sampled_from(WORKERS)


class Tree:
    """Chains of blocks: every prompt is a path; a path's hashes name its whole prefix."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[int, ...], int] = {}
        self.parents: dict[int, int] = {}

    def chain(self, path: list[int]) -> list[int]:
        found, parent = [], 0
        for end in range(1, len(path) + 1):
            key = tuple(path[:end])
            if key not in self._hashes:
                self._hashes[key] = len(self._hashes) * 977 + 1
                self.parents[self._hashes[key]] = parent
            parent = self._hashes[key]
            found.append(parent)
        return found


paths = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class IndexMachine(RuleBasedStateMachine):
    """Every worker behaves as an engine does: a block is held only with those above it."""

    budget = 1 << 30

    @initialize()
    def begin(self) -> None:
        self.index = KvIndex(self.budget)
        self.tree = Tree()
        self.truth: dict[str, set[int]] = {worker: set() for worker in WORKERS}

    @rule(worker=workers, path=paths, again=st.booleans())
    def store(self, worker: str, path: list[int], again: bool) -> None:
        chain = self.tree.chain(path)
        held = self.truth[worker]
        known = 0 if again else sum(block in held for block in chain)
        if chain[known:]:
            parent = chain[known - 1] if known else 0
            self.index.store(worker, parent, chain[known:])
            held.update(chain)

    @rule(worker=workers, path=paths, keep=st.integers(0, 12))
    def remove_below(self, worker: str, path: list[int], keep: int) -> None:
        """A subtree, tails first."""
        chain = self.tree.chain(path)
        if keep >= len(chain):
            return
        gone = {chain[keep]}
        for block in sorted(self.tree.parents):
            if self.tree.parents[block] in gone:
                gone.add(block)
        order = [block for block in sorted(gone, reverse=True) if block in self.truth[worker]]
        self.index.remove(worker, order)
        self.truth[worker] -= gone

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        self.index.clear(worker)
        self.truth[worker].clear()

    @rule()
    def sweep(self) -> None:
        for _ in range(50):
            self.index.remove("nobody", ())

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

    def check_match(self, found: dict[str, int], expected: dict[str, int]) -> None:
        assert found == expected

    @invariant()
    def every_block_is_known(self) -> None:
        for worker, held in self.truth.items():
            assert self.index.held(worker) == held


class TightMachine(IndexMachine):
    """Under a budget of a few blocks the index knows less, never more, and stays below it."""

    budget = 6_000

    def check_match(self, found: dict[str, int], expected: dict[str, int]) -> None:
        assert all(depth <= expected[worker] for worker, depth in found.items())

    @invariant()
    def every_block_is_known(self) -> None:
        assert self.index.bytes_used <= self.budget
        for worker, held in self.truth.items():
            assert self.index.held(worker) <= held


TestIndex = IndexMachine.TestCase
TestTightIndex = TightMachine.TestCase
for case in (TestIndex, TestTightIndex):
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
