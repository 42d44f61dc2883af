"""What predictions add to overlaps, against a plain list of prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.index.conftest import chain

from dynamo.scheduling.index.predictions import Predictions

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
    predictions = Predictions(ttl_s=1.0)
    expected = dict(known)
    for worker, sent in routed:
        predictions.routed(worker, sent, 0.0)
        expected[worker] = max(expected.get(worker, 0), common(prompt, sent))
    predictions.add_to(known, prompt, 0.0)
    assert known == expected
