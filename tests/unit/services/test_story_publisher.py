"""Stories are published in batches: good ones are thinned, bad ones never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.observer.stories import make_attempt, make_story
from tests.unit.processes import Open

from dynamo.communication.events import Event
from dynamo.services.observing import publisher as publishing
from dynamo.services.observing.publisher import StoryPublisher
from dynamo.telemetry.story import (
    Candidate,
    EndedStory,
    ProcessSample,
    Story,
    StoryBatch,
    decode_batch,
)

TABLE = (Candidate("w1", 3, 12.5, {"queue": 12.5}),)


def wrap(ended: EndedStory) -> Story:
    story = Story("r", "r", "/", "m", 0.0, 0.0, 0.0, {}, 0, 1, 1)
    story.ended = ended
    return story


async def open_publisher(open_runtime: Open) -> tuple[StoryPublisher, Callable[[], Any]]:
    runtime = await open_runtime()
    received: list[StoryBatch] = []

    def listen(event: Event) -> None:
        if event.payload:
            received.append(decode_batch(event.payload))

    await runtime.events.subscribe("dynamo.stories", listen)
    publisher = StoryPublisher(runtime, lambda: ProcessSample(2, {"w1": 3}))
    await publisher.start()

    async def next_batch() -> StoryBatch:
        publisher.publish()
        while not received:
            await runtime.clock.sleep(0)
        return received.pop()

    return publisher, next_batch


async def test_good_stories_beyond_the_limit_are_left_out_and_counted(
    open_runtime: Open, monkeypatch: Any
) -> None:
    monkeypatch.setattr(publishing, "MAX_STORIES", 3)
    publisher, next_batch = await open_publisher(open_runtime)
    for number in range(10):
        publisher.add(wrap(make_story(request_id=f"good-{number}")))
    publisher.add(wrap(make_story(request_id="bad", end="worker_failed")))
    publisher.add(wrap(make_story(make_attempt(), make_attempt(), request_id="moved")))
    publisher.add(wrap(make_story(request_id="late", ended_us=6_000_000)))
    batch = await next_batch()
    assert [story.request_id for story in batch.stories] == [
        "good-0", "good-1", "good-2", "bad", "moved", "late",
    ]  # fmt: skip
    assert (batch.dropped, batch.sample) == (7, ProcessSample(2, {"w1": 3}))
    assert (await next_batch()).stories == []


async def test_cost_tables_are_built_for_some_requests_of_a_batch(
    open_runtime: Open, monkeypatch: Any
) -> None:
    monkeypatch.setattr(publishing, "MAX_TABLES", 1)
    publisher, next_batch = await open_publisher(open_runtime)
    built = []

    def table() -> tuple[Candidate, ...]:
        built.append(1)
        return TABLE

    for _ in range(3):
        publisher.add(wrap(make_story(make_attempt(costs=table))))
    stories = (await next_batch()).stories
    assert [story.attempts[0].cost_table() for story in stories] == [[*TABLE], [], []]
    assert len(built) == 1
