"""The observer keeps stories by their budgets, and answers questions about them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.observer.stories import make_attempt, make_story

from dynamo.core.clock import SystemClock
from dynamo.core.errors import NotFound
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Load
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.operations.observer.stories import MAX_BAD, MAX_LAST, KeptStory, StoryStore
from dynamo.telemetry.story import (
    Candidate,
    EndedStory,
    ProcessSample,
    RouterChoice,
    StoryBatch,
    decode_batch,
    encode_batch,
)

WORKER_TIMES = WorkerTimes()
TABLE = (Candidate("w1", 3, 12.5, {"queue": 12.5}),)


def publish(observer: DeploymentObserver, *stories: EndedStory, **fields: Any) -> None:
    """Send a batch through its wire format."""
    batch = StoryBatch("frontend-1", 1_000.0, list(stories), **fields)
    observer.on_batch(decode_batch(encode_batch(batch)))


def test_a_burst_of_good_requests_pushes_no_bad_or_slow_one_out() -> None:
    store = StoryStore()
    bad = KeptStory(make_story(request_id="bad", end="worker_failed"), "f")
    slow = KeptStory(make_story(request_id="slow", ended_us=9_000_000), "f")
    store.add(bad)
    store.add(slow)
    for number in range(2 * MAX_LAST):
        store.add(KeptStory(make_story(request_id=f"r-{number}"), "f"))
    assert store.find("bad") == [bad]
    assert store.find("slow") == [slow]
    assert store.find("r-3") == []
    for number in range(2 * MAX_BAD):
        store.add(KeptStory(make_story(request_id=f"b-{number}", end="late"), "f"))
    assert store.find("slow") == [slow]


def test_a_story_is_found_by_each_of_its_ids() -> None:
    observer = DeploymentObserver(SystemClock())
    publish(observer, make_story(request_id="mine-1", client_id="mine", trace="ab" * 16))
    for name in ("mine-1", "mine", "ab" * 16):
        (story,) = observer.find(name)
        assert (story["request_id"], story["process"]) == ("mine-1", "frontend-1")
    assert sum(stage["seconds"] for stage in story["stages"]) == pytest.approx(story["seconds"])
    assert story["attempts"][0]["times"]["ahead_tokens"] == 0
    with pytest.raises(NotFound, match="no story"):
        observer.find("other")


def test_stories_are_listed_by_length_end_and_worker() -> None:
    observer = DeploymentObserver(SystemClock())
    slow = make_story(request_id="slow", ended_us=3_000_000)
    failed = make_story(make_attempt(worker="w2-abc"), request_id="failed", end="worker_failed")
    publish(observer, slow, failed, make_story(request_id="good"))

    def ids(**wanted: Any) -> set[str]:
        return {story["request_id"] for story in observer.list_stories(**wanted)}

    assert ids(slow=2.0) == {"slow"}
    assert ids(failed=True) == {"failed"}
    assert ids(worker="w2") == ids(worker="w2-abc") == {"failed"}
    assert ids(worker="w") == set()
    assert ids() == {"slow", "failed", "good"}


def test_a_routers_costs_join_the_story_of_a_frontend() -> None:
    observer = DeploymentObserver(SystemClock())
    choice = RouterChoice("r-1", 1_000.0, make_attempt(costs=TABLE))
    observer.on_batch(decode_batch(encode_batch(StoryBatch("router-1", 1.0, choices=[choice]))))
    publish(observer, make_story())
    (explained,) = observer.explain("r")
    assert (explained["router"], list(explained["costs"])) == ("router-1", list(TABLE))
    assert explained["outcome"]["output_tokens"] == 10
    assert len(observer.explain("")) == 1


def test_late_requests_are_grouped_by_cause() -> None:
    clock = SystemClock()
    observer = DeploymentObserver(clock)
    now = clock.wall()
    publish(observer, *(make_story(request_id=f"r-{n}", wall_s=now) for n in range(20)))
    times = replace(
        make_attempt().times or WORKER_TIMES, queue_s=2.0, ahead_requests=1, ahead_longest=9_000
    )
    late = make_attempt(first_us=2_051_000, ended_us=2_151_000, times=times)
    for name in ("late-1", "late-2"):
        publish(observer, make_story(late, request_id=name, wall_s=now, ended_us=2_152_000))
    (group,) = observer.group_causes()
    shown = group["cause"], group["requests"], group["workers"]
    assert shown == ("long prompt ahead", 2, {"w1": 2})
    assert group["seconds"] == pytest.approx(4.0, rel=0.01)


async def test_processes_make_one_series_for_each_worker() -> None:
    observer = DeploymentObserver(SystemClock())
    publish(observer, sample=ProcessSample(1, {"w1": 3, "w2": 5}, {"w1": "exact", "w2/0": "exact"}))
    sample = ProcessSample(2, {"w1": 1}, {"w2/1": "stale"})
    observer.on_batch(StoryBatch("frontend-2", 1.0, [make_story()], sample=sample))
    observer.sample({"w1": Load(running=4)})
    timeline = await observer.timeline()
    assert timeline["waiting"] == [3]
    w1, w2 = timeline["workers"]["w1"], timeline["workers"]["w2"]
    assert (w1["sent"], w1["running"]) == (4, 4)
    assert (w1["view"], w2["view"]) == ("exact", "stale")
    observer.on_process_gone("frontend-1")
    observer.sample({"w1": Load(running=4)})
    report = await observer.report()
    assert report.raw_data_summary["by_worker"] == {"w1": 1}
