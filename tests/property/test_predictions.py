"""What predictions add to overlaps, against a plain list of prompts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.index.conftest import chain

from dynamo.scheduling.index.approximate_index import EVENT_GRACE_S, ApproximateIndex

STEM = chain(0, 40)
prompts = st.builds(
    lambda shared, name, own: STEM[:shared] + chain(name + 10 * shared, own),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 40),
)
workers = st.sampled_from(["a", "b", "c"])


def common(one: list[int], other: list[int]) -> int:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


@given(
    st.lists(st.tuples(workers, prompts), max_size=6),
    prompts,
    st.dictionaries(workers, st.integers(1, 81)),
)
def test_whatever_is_more(
    routed: list[tuple[str, list[int]]], prompt: list[int], known: dict[str, int]
) -> None:
    known = {worker: min(depth, len(prompt)) for worker, depth in known.items()}
    predictions = ApproximateIndex(ttl_s=1.0)
    expected = dict(known)
    for worker, sent in routed:
        predictions.add(worker, sent, 0.0)
        expected[worker] = max(expected.get(worker, 0), common(prompt, sent))
    predictions.merge_overlaps(known, prompt, 0.0)
    assert known == expected


class Believed:
    def __init__(self, worker: str, prompt: list[int], due: float) -> None:
        self.worker = worker
        self.prompt = prompt
        self.due = due
        self.kept = False

    def same(self, other: Believed) -> bool:
        return self.worker == other.worker and self.prompt[-1] == other.prompt[-1]


class PredictionsMachine(RuleBasedStateMachine):
    """Prompts that come, settle, are kept or expire, against a list of those believed in."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions = ApproximateIndex(ttl_s=3.0)
        self.now = 0.0
        self.open: list[Believed] = []
        self.closing: list[Believed] = []

    @rule(worker=workers, prompt=prompts)
    def route(self, worker: str, prompt: list[int]) -> None:
        self.predictions.add(worker, prompt, self.now)
        self.open.append(Believed(worker, prompt, self.now + 3.0))

    @rule(at=st.integers(0, 20), keep=st.booleans())
    def settle(self, at: int, keep: bool) -> None:
        if at >= len(self.open):
            return
        given = self.open[at]
        self.predictions.settle(given.worker, given.prompt, self.now, until_ttl=keep)
        one = next(one for one in self.open if one.same(given))
        self.open.remove(one)
        if keep:
            one.kept = True
            self.open.append(one)
        else:
            self.closing.append(Believed(one.worker, one.prompt, self.now + EVENT_GRACE_S))

    @rule(worker=workers)
    def tell(self, worker: str) -> None:
        self.predictions.expire_retained(worker, self.now)
        for one in [one for one in self.open if one.worker == worker and one.kept]:
            self.open.remove(one)
            self.closing.append(Believed(worker, one.prompt, self.now + EVENT_GRACE_S))

    @rule(worker=workers)
    def drop(self, worker: str) -> None:
        self.predictions.remove_worker(worker)
        self.open = [one for one in self.open if one.worker != worker]
        self.closing = [one for one in self.closing if one.worker != worker]

    @rule(seconds=st.sampled_from([0.25, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.open = [one for one in self.open if one.due > self.now]
        self.closing = [one for one in self.closing if one.due > self.now]

    @rule(prompt=prompts)
    def look(self, prompt: list[int]) -> None:
        expected: dict[str, int] = {}
        for one in self.open + self.closing:
            if depth := common(prompt, one.prompt):
                expected[one.worker] = max(expected.get(one.worker, 0), depth)
        found: dict[str, int] = {}
        self.predictions.merge_overlaps(found, prompt, self.now)
        assert found == expected

    @invariant()
    def all_is_counted(self) -> None:
        self.predictions.expire(self.now)
        believed = self.open + self.closing
        assert self.predictions.block_count == sum(len(one.prompt) for one in believed)

    def teardown(self) -> None:
        for worker in ("a", "b", "c"):
            self.predictions.remove_worker(worker)
        assert not self.predictions._nodes
        assert not self.predictions._active_by_key


TestPredictions = PredictionsMachine.TestCase
TestPredictions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
