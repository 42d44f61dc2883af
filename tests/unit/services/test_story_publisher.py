"""Stories are published in batches: good ones are thinned, bad ones never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests.unit.observer.stories import make_attempt, make_story
from tests.unit.processes import Open

from dynamo.application.frontend_metrics import FrontendMetrics
from dynamo.communication.events import Event
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.operations.observer.stages import STAGES
from dynamo.services.observing import publisher as publishing
from dynamo.services.observing.publisher import StoryPublisher
from dynamo.telemetry.openmetrics import to_openmetrics
from dynamo.telemetry.story import (
    NO_OPTIONS,
    Candidate,
    EndedStory,
    ProcessSample,
    RouterChoice,
    Story,
    StoryBatch,
    decode_batch,
    encode_batch,
)

TABLE = (Candidate("w1", 3, 12.5, {"queue": 12.5}),)


def wrap(ended: EndedStory) -> list[Story]:
    story = Story("r", "r", "/", "m", 0.0, 0.0, {}, NO_OPTIONS, False, 1)
    story.ended = ended
    return [story]


def dropped(publisher: StoryPublisher) -> dict[str, float]:
    children = publisher._dropped.children
    return {why: counter.value for (why,), counter in children.items()}


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
    assert dropped(publisher) == {"too_many": 7, "not_packed": 0, "not_sent": 0}


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


async def test_stories_are_counted_by_stage_and_named_as_examples(open_runtime: Open) -> None:
    runtime = await open_runtime()
    registry = runtime.metrics
    metrics = FrontendMetrics(registry, ttft_promise_s=0.75, gap_promise_s=3, stage_names=STAGES)
    metrics.for_model("m")
    publisher = StoryPublisher(runtime, lambda: None, metrics)
    await publisher.start()
    times = WorkerTimes(queue_s=0.0, kv_s=0.0, prefill_s=0.04, decode_s=0.1, recomputed_tokens=7)
    publisher.add(wrap(make_story(make_attempt(times=times), trace="ab" * 16, gap_us=20_000)))
    publisher.add(wrap(make_story(request_id="nobody", model="", end="model_not_found")))
    publisher.publish()

    lines = registry.render().splitlines()
    decode = 'dynamo_request_stage_seconds_bucket{model="m",stage="decode"'
    assert [line for line in lines if line.startswith(f'{decode},le="0.1"}}')] == [
        f'{decode},le="0.1"}} 1'
    ]
    assert 'dynamo_request_stage_seconds_count{model="m",stage="worker"} 0' in lines
    assert 'dynamo_request_longest_gap_seconds_bucket{model="m",le="3.0"} 1' in lines
    assert 'dynamo_request_recomputed_tokens_total{model="m"} 7' in lines
    assert 'dynamo_frontend_time_to_first_token_seconds_bucket{model="m",le="0.75"} 0' in lines
    assert not [line for line in lines if 'model=""' in line]
    first = 'dynamo_frontend_time_to_first_token_seconds_bucket{model="m",le="0.1"}'
    assert registry.exemplars()[first] == (
        f' # {{trace_id="{"ab" * 16}",request_id="r-1"}} 0.051 1000.152'
    )
    metrics.remove_model("m")
    publisher.add(wrap(make_story(make_attempt())))
    publisher.publish()
    assert 'model="m"' not in registry.render()


async def test_promises_of_a_served_model_are_counted_from_0(open_runtime: Open) -> None:
    runtime = await open_runtime()
    metrics = FrontendMetrics(runtime.metrics, stage_names=STAGES)
    publisher = StoryPublisher(runtime, lambda: None, metrics)
    await publisher.start()

    def values() -> dict[tuple[str, str], float]:
        lines = runtime.metrics.render().splitlines()
        series = [line for line in lines if line.startswith("dynamo_slo_requests_total{")]
        return {
            (text.split('"')[3], text.split('"')[5]): float(value)
            for text, _, value in (line.rpartition(" ") for line in series)
        }

    assert values() == {}
    metrics.for_model("m")
    kinds = [(slo, word) for slo in ("availability", "ttft", "itl") for word in ("good", "bad")]
    assert values() == dict.fromkeys(kinds, 0)
    publisher.add(wrap(make_story()))
    publisher.publish()
    assert values()["availability", "good"] == 1
    metrics.remove_model("m")
    assert values() == {}
    metrics.for_model("m")
    assert values()["availability", "good"] == 1  # a counter never falls


@pytest.mark.parametrize(
    ("trace", "id_length", "labels"),
    [("", 118, {"request_id"}), ("", 119, set()), ("ab" * 16, 78, {"trace_id", "request_id"})]
    + [("ab" * 16, length, {"trace_id"}) for length in (79, 140)],
)
async def test_long_ids_of_clients_are_no_examples(
    open_runtime: Open, trace: str, id_length: int, labels: set[str]
) -> None:
    runtime = await open_runtime()
    metrics = FrontendMetrics(runtime.metrics, stage_names=STAGES)
    metrics.for_model("m")
    publisher = StoryPublisher(runtime, lambda: None, metrics)
    await publisher.start()
    publisher.add(wrap(make_story(make_attempt(), trace=trace, request_id="r" * id_length)))
    publisher.publish()
    text = to_openmetrics(runtime.metrics.render(), runtime.metrics.exemplars())
    examples = [
        set(sample.exemplar.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar
    ]
    assert examples
    assert all(each == labels for each in examples)


async def test_a_story_that_cannot_be_packed_is_left_out(
    open_runtime: Open, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, next_batch = await open_publisher(open_runtime)
    publisher.add(wrap(make_story(client_id="\ud800")))
    for _ in range(3):
        publisher.add(wrap(make_story()))
    assert len((await next_batch()).stories) == 3
    assert "a story is left out" in caplog.text
    assert dropped(publisher) == {"too_many": 0, "not_packed": 1, "not_sent": 0}


async def test_stories_that_the_event_plane_refuses_are_counted(
    open_runtime: Open, monkeypatch: Any
) -> None:
    publisher, next_batch = await open_publisher(open_runtime)
    for _ in range(5):
        publisher.add(wrap(make_story()))
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "_source", None)
        with pytest.raises(AttributeError):
            publisher.publish()
    assert dropped(publisher) == {"too_many": 0, "not_packed": 0, "not_sent": 5}
    publisher.add(wrap(make_story()))
    assert len((await next_batch()).stories) == 1


def test_times_are_sent_as_fractions_and_received_as_whole_microseconds() -> None:
    attempt = make_attempt(placed_us=1_000.75, first_us=None)
    story = make_story(attempt, ended_us=152_000.5, admitting_us=None)
    choice = RouterChoice("r", 1.0, make_attempt(waited_us=7.25))
    batch = decode_batch(encode_batch(StoryBatch("f", 1.0, [story], [choice])))
    (received,) = batch.stories
    times = (received.ended_us, received.admitting_us, received.attempts[0].placed_us)
    assert (times, batch.choices[0].attempt.waited_us) == ((152_000, None, 1_000), 7)
    assert isinstance(received.ended_us, int)


@pytest.mark.parametrize("us", [float("nan"), float("inf")])
def test_a_batch_with_a_time_that_is_no_number_cannot_be_decoded(us: float) -> None:
    payload = encode_batch(StoryBatch("f", 1.0, [make_story(ended_us=us)]))
    with pytest.raises(msgspec.ValidationError):
        decode_batch(payload)
