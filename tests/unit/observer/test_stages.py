"""The stages of a story sum up to the whole, whatever its clocks and engines tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.observer.stories import make_attempt, make_story

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.operations.observer.stages import STAGES, find_stages, stage_durations
from dynamo.telemetry.story import EndedStory


def by_name(story: EndedStory) -> dict[str, int]:
    return {stage.name: stage.us for stage in find_stages(story)}


def test_a_request_has_all_stages() -> None:
    assert by_name(make_story()) == {
        "read": 100,
        "tokenise": 400,
        "admit": 500,
        "send": 2_000,
        "prefill": 48_000,
        "decode": 100_000,
        "deliver": 1_000,
    }


def test_an_engine_that_does_not_tell_leaves_one_stage_for_queue_and_prefill() -> None:
    story = make_story(make_attempt(times=None))
    assert by_name(story)["worker"] == 50_000
    assert "prefill" not in by_name(story)


def test_the_times_of_a_prefill_worker_are_no_transfer() -> None:
    times = WorkerTimes(
        queue_s=0.002, kv_s=0.04, kv_from="peer", prefill_s=0.0, decode_s=0.1,
        peer_queue_s=0.01, peer_prefill_s=0.025,
    )  # fmt: skip
    stages = by_name(make_story(make_attempt(times=times, prefill_worker="p1")))
    assert (stages["queue"], stages["prefill"], stages["transfer"]) == (12_000, 25_000, 5_000)


def test_a_moved_request_has_the_stages_of_each_attempt() -> None:
    first = make_attempt(ended_us=80_000, error="worker_failed")
    second = make_attempt(
        worker="w2", choosing_us=90_000, placed_us=90_500, first_us=140_500, ended_us=150_500,
        times=WorkerTimes(queue_s=0.01, kv_s=0.0, prefill_s=0.03, decode_s=0.01),
    )  # fmt: skip
    stages = [(each.name, each.attempt) for each in find_stages(make_story(first, second))]
    assert stages[3:] == [
        ("send", 0), ("prefill", 0), ("decode", 0), ("place", 1), ("send", 1), ("queue", 1),
        ("prefill", 1), ("decode", 1), ("deliver", 1),
    ]  # fmt: skip


def test_a_rejected_request_was_in_admission() -> None:
    story = make_story(end="overloaded", ended_us=30_500, waited_for="slot")
    story.attempts = []
    assert by_name(story) == {"read": 100, "tokenise": 400, "admit": 30_000}


def test_a_request_that_waited_for_its_model_was_not_read_so_long() -> None:
    story = make_story(waited_for="model", limit_us=60_000, read_us=60_100, admitting_us=60_500)
    assert by_name(story)["read"] == 100
    assert find_stages(story)[0].name == "admit"


US = st.integers(0, 2_000_000)
SECONDS = st.one_of(st.none(), st.floats(0, 3))


@given(st.lists(US, min_size=6, max_size=6), st.lists(SECONDS, min_size=6, max_size=6), US)
def test_stages_sum_up_and_follow_each_other(
    moments: list[int], times: list[float | None], limit_us: int
) -> None:
    read, admitting, choosing, placed, first, ended = sorted(moments)
    measured = WorkerTimes(
        queue_s=times[0], kv_s=times[1], prefill_s=times[2], decode_s=times[3],
        peer_queue_s=times[4], peer_prefill_s=times[5],
    )  # fmt: skip
    attempt = make_attempt(
        choosing_us=choosing, placed_us=placed, first_us=first, ended_us=ended, times=measured
    )
    story = make_story(
        attempt, read_us=read, admitting_us=admitting, ended_us=ended, limit_us=limit_us
    )
    stages = find_stages(story)
    assert sum(stage.us for stage in stages) == ended
    assert all(stage.us > 0 for stage in stages)
    at_us = 0
    for stage in stages:
        assert stage.began_us == at_us
        at_us += stage.us
    sums = dict.fromkeys(STAGES, 0)
    for stage in stages:
        sums[stage.name] += stage.us
    assert dict(zip(STAGES, stage_durations(story), strict=True)) == pytest.approx(sums, abs=1)


@pytest.mark.parametrize("end", ["", "cancelled", "worker_failed"])
def test_a_request_without_a_first_token_has_a_whole(end: str) -> None:
    story = make_story(make_attempt(first_us=None, times=None, error=end), end=end)
    assert sum(stage.us for stage in find_stages(story)) == story.ended_us
