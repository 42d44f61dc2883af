"""The approximate index against a reference list of prompts."""

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


def common(first: list[int], second: list[int]) -> int:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


@given(
    st.lists(st.tuples(workers, prompts), max_size=6),
    prompts,
    st.dictionaries(workers, st.integers(1, 81)),
)
def test_overlaps_are_raised_to_predictions(
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


class ExpectedPrompt:
    """A predicted prompt of the reference."""

    def __init__(self, worker: str, prompt: list[int], expires_s: float) -> None:
        self.worker = worker
        self.prompt = prompt
        self.expires_s = expires_s
        self.until_ttl = False

    def same(self, other: ExpectedPrompt) -> bool:
        return self.worker == other.worker and self.prompt[-1] == other.prompt[-1]


class PredictionsMachine(RuleBasedStateMachine):
    """Prompts that are routed, end, remain until their time to live or expire, against a reference list."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions = ApproximateIndex(ttl_s=3.0)
        self.now = 0.0
        self.open: list[ExpectedPrompt] = []
        self.closing: list[ExpectedPrompt] = []

    @rule(worker=workers, prompt=prompts)
    def route(self, worker: str, prompt: list[int]) -> None:
        self.predictions.add(worker, prompt, self.now)
        self.open.append(ExpectedPrompt(worker, prompt, self.now + 3.0))

    @rule(at=st.integers(0, 20), until_ttl=st.booleans())
    def end_prediction(self, at: int, until_ttl: bool) -> None:
        if at >= len(self.open):
            return
        chosen = self.open[at]
        self.predictions.end_prediction(chosen.worker, chosen.prompt, self.now, until_ttl=until_ttl)
        routed = next(routed for routed in self.open if routed.same(chosen))
        self.open.remove(routed)
        if until_ttl:
            routed.until_ttl = True
            self.open.append(routed)
        else:
            self.closing.append(
                ExpectedPrompt(routed.worker, routed.prompt, self.now + EVENT_GRACE_S)
            )

    @rule(worker=workers)
    def report_events(self, worker: str) -> None:
        self.predictions.end_until_ttl(worker, self.now)
        for routed in [
            routed for routed in self.open if routed.worker == worker and routed.until_ttl
        ]:
            self.open.remove(routed)
            self.closing.append(ExpectedPrompt(worker, routed.prompt, self.now + EVENT_GRACE_S))

    @rule(worker=workers)
    def remove_worker(self, worker: str) -> None:
        self.predictions.remove_worker(worker)
        self.open = [routed for routed in self.open if routed.worker != worker]
        self.closing = [routed for routed in self.closing if routed.worker != worker]

    @rule(seconds=st.sampled_from([0.25, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.open = [routed for routed in self.open if routed.expires_s > self.now]
        self.closing = [routed for routed in self.closing if routed.expires_s > self.now]

    @rule(prompt=prompts)
    def merge_overlaps(self, prompt: list[int]) -> None:
        expected: dict[str, int] = {}
        for routed in self.open + self.closing:
            if depth := common(prompt, routed.prompt):
                expected[routed.worker] = max(expected.get(routed.worker, 0), depth)
        overlaps: dict[str, int] = {}
        self.predictions.merge_overlaps(overlaps, prompt, self.now)
        assert overlaps == expected

    @invariant()
    def blocks_are_counted(self) -> None:
        self.predictions.expire(self.now)
        expected = self.open + self.closing
        assert self.predictions.block_count == sum(len(routed.prompt) for routed in expected)

    def teardown(self) -> None:
        for worker in ("a", "b", "c"):
            self.predictions.remove_worker(worker)
        assert not self.predictions._nodes
        assert not self.predictions._active_by_key


TestPredictions = PredictionsMachine.TestCase
TestPredictions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
