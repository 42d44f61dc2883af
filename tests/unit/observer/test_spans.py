"""Spans are made from stories, and a library of OpenTelemetry reads them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.unit.observer.stories import make_attempt, make_story

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.operations.observer.spans import SpanEncoder
from dynamo.operations.observer.stories import KeptStory
from dynamo.telemetry.story import EndedStory
from dynamo.telemetry.trace_context import make_span_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
LOST = make_attempt(
    key="r-1/0/0", worker="worker-1-0123456789", first_us=31_000, ended_us=61_000,
    error="worker_failed", times=None,
)  # fmt: skip
AGAIN = make_attempt(
    key="r-1/0/1", worker="worker-2-0123456789", placed_us=62_000, first_us=101_000,
    ended_us=151_000, resumed=3, prefill_worker="worker-3-0123456789", predicted_us=40_000,
    times=WorkerTimes(
        queue_s=0.004, ahead_requests=2, ahead_tokens=90, kv_s=0.030, kv_from="peer",
        peer_queue_s=0.002, peer_prefill_s=0.020, prefill_s=0.003, decode_s=0.05, gap_s=0.01,
        preemptions=1, recomputed_tokens=4,
    ),
)  # fmt: skip
MOVED = make_story(
    LOST, AGAIN, trace=TRACE, parent_id="00f067aa0ba902b7", path="/v1/chat/completions",
    options=(9, 0.5, None, None, None, None, None, ["x", "y"], True),
)  # fmt: skip


def export(*stories: EndedStory) -> list[Any]:
    """Return the spans as a collector reads them, which are one trace for each story."""
    entries = [
        KeptStory(replace(story, trace=story.trace or TRACE, trace_state="a=b"), "frontend-1")
        for story in stories
    ]
    encoded = SpanEncoder({"service.name": "s"}, {}).encode(entries)
    message = ExportTraceServiceRequest.FromString(encoded)
    (resource,) = message.resource_spans
    assert resource.resource.attributes[0].value.string_value == "s"
    (scope,) = resource.scope_spans
    assert scope.scope.name == "dynamo"
    return list(scope.spans)


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def assert_is_tree(spans: list[Any]) -> None:
    """Assert one root, no orphan, no id twice, and children within their parents."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    roots = [span for span in spans if span.parent_span_id not in by_id]
    assert len(roots) == 1
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano, span
        parent = by_id.get(span.parent_span_id)
        if parent is not None:
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, span
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, span


def test_a_moved_request_is_one_tree_with_a_link_and_an_event() -> None:
    spans = export(MOVED)
    assert_is_tree(spans)
    names = [span.name for span in spans]
    assert names[0] == "chat m"
    for name in ("tokenise", "generate worker-1", "generate worker-2"):
        assert names.count(name) == 1
    assert names[names.index("generate worker-2") + 1 :] == [
        "queue", "transfer", "prefill", "decode",
    ]  # fmt: skip
    root, lost, again = spans[0], *(span for span in spans if span.name.startswith("generate"))
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert {span.trace_state for span in spans} == {"a=b"}
    assert lost.span_id.hex() == make_span_id("r-1/0/0")
    assert (lost.status.code, lost.status.message) == (2, "worker_failed")
    assert [link.span_id for link in again.links] == [lost.span_id]
    (event,) = root.events
    assert (event.name, attributes(event)["dynamo.move.token"]) == ("moved", 3)


def test_attributes_have_the_names_of_the_conventions() -> None:
    root, *_ = export(MOVED)
    shown = attributes(root)
    assert shown["gen_ai.operation.name"] == "chat"
    assert shown["gen_ai.request.max_tokens"] == 9
    assert shown["gen_ai.request.temperature"] == 0.5
    assert shown["gen_ai.request.stream"] is True
    assert [each.string_value for each in shown["gen_ai.request.stop_sequences"].values] == [
        "x",
        "y",
    ]
    assert shown["gen_ai.usage.input_tokens"] == 64
    assert shown["gen_ai.usage.cache_read.input_tokens"] == 0
    assert shown["http.response.status_code"] == 200
    assert shown["dynamo.moves"] == 1
    prefill = next(span for span in export(MOVED) if span.name == "prefill")
    assert attributes(prefill)["dynamo.worker.id"] == "worker-3-0123456789"


def test_requests_without_a_worker_and_with_nonsense_times_are_trees_too() -> None:
    rejected = make_story(end="overloaded", first_us=None, ended_us=3_000)
    rejected.attempts = []
    root, *_ = export(rejected)
    assert attributes(root)["error.type"] == "overloaded"
    assert root.status.code == 2
    wild = make_attempt(
        key="r-1/0/0", placed_us=90_000, first_us=10_000, ended_us=5_000,
        times=WorkerTimes(queue_s=3_600.0, prefill_s=-1.0, kv_s=9.0, decode_s=7.0),
    )  # fmt: skip
    for story in (rejected, make_story(wild), make_story(LOST, ended_us=1)):
        assert_is_tree(export(story))
    gone = replace(MOVED, end="cancelled", first_us=None)
    assert attributes(export(gone)[0])["http.response.status_code"] == 499
    choices = [make_attempt(choice=choice, key=f"r-1/{choice}/0") for choice in range(3)]
    several = export(make_story(*choices, choices=3))
    assert_is_tree(several)
    assert not any(span.links for span in several)
