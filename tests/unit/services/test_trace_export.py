"""Chosen requests are sent to a collector; one that refuses, hangs or is away costs a counter."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.fake_openai_server import FakeServer, served
from tests.unit.observer.stories import make_attempt, make_story

from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError
from dynamo.operations.observer.stories import KeptStory
from dynamo.services.observing import trace_export
from dynamo.services.observing.trace_export import CLIENT_SAMPLED_PER_S, TraceExporter, TraceOptions
from dynamo.telemetry.metrics import Registry
from dynamo.telemetry.slo import FAILED, GOOD, LATE_FIRST
from dynamo.telemetry.story import EndedStory
from dynamo.telemetry.trace_context import make_trace_id

UNLUCKY, LUCKY = "f" * 32, "0" * 31 + "1"
"""Traces that belong to no share of requests, and to every share."""
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def open_exporter(url: str, **environ: str) -> TraceExporter:
    options = TraceOptions.from_environ({ENDPOINT: url, **environ})
    assert options is not None
    return TraceExporter(options, SystemClock(), Registry())


def story(number: int, **fields: Any) -> EndedStory:
    values = {
        "trace": UNLUCKY if "trace_flags" in fields else "",
        "slo": GOOD,
        "request_id": f"r-{number}",
    }
    attempts = fields.pop("attempts", (make_attempt(key=f"r-{number}/0/0"),))
    return make_story(*attempts, **(values | fields))


async def flush(exporter: TraceExporter) -> None:
    """Send what is chosen, as `run` does once a second."""
    pending = list(exporter._pending)
    exporter._pending.clear()
    if pending:
        await exporter._export(pending)


def received(fake: FakeServer) -> list[str]:
    """Return the request ids of the roots that the collector has received."""
    names = []
    for body in fake.bodies:
        data = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for span in resource.scope_spans[0].spans:
                shown = {each.key: each.value.string_value for each in span.attributes}
                names += [shown["dynamo.request.id"]] if "dynamo.request.id" in shown else []
    return names


CASES = {
    "like others": ({}, False),
    "one of a hundred": ({"trace": LUCKY}, True),
    "failed": ({"slo": FAILED, "end": "worker_failed"}, True),
    "late": ({"slo": LATE_FIRST}, True),
    "moved": ({"attempts": (make_attempt(key="a/0/0"), make_attempt(key="a/0/1"))}, True),
    "a client's mistake": ({"slo": 0, "end": "invalid_request"}, False),
    "asked for": ({"trace_flags": 1}, True),
    "forbidden": ({"trace_flags": 0, "slo": FAILED, "trace": LUCKY}, False),
}


async def test_what_failed_moved_was_late_or_is_asked_for_is_sent() -> None:
    async with served() as fake:
        fake.answers["/v1/traces"] = (200, "content-type: application/json\r\n", b"{}")
        exporter = open_exporter(fake.url, OTEL_EXPORTER_OTLP_HEADERS="x-key=a%20b,y=c")
        expected = []
        for number, (fields, wanted) in enumerate(CASES.values()):
            exporter.add(KeptStory(story(number, **fields), "frontend-1"))
            expected += [f"r-{number}"] * wanted
        await flush(exporter)
        assert received(fake) == expected
        assert fake.requests == ["/v1/traces"]
        assert b"x-key: a b\r\n" in fake.headers
        assert b"content-type: application/x-protobuf\r\n" in fake.headers
        assert (exporter.sent, sum(exporter.dropped.values())) == (len(expected), 0)


async def test_samplers_of_the_usual_names_are_obeyed() -> None:
    async def sent(begun: str = "", **environ: str) -> set[str]:
        async with served() as fake:
            fake.answers["/v1/traces"] = (200, "", b"\xff nonsense")
            exporter = open_exporter(fake.url, OTEL_EXPORTER_OTLP_COMPRESSION="gzip", **environ)
            for number, (fields, _) in enumerate(CASES.values()):
                own = {} if "trace_flags" in fields else {"trace": begun}
                exporter.add(KeptStory(story(number, **(fields | own)), "frontend-1"))
            await flush(exporter)
            names = list(CASES)
            return {names[int(each.removeprefix("r-"))] for each in received(fake)}

    every = set(CASES)
    assert await sent(begun=UNLUCKY, OTEL_TRACES_SAMPLER="always_on") == every
    environ = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}
    assert await sent(begun=UNLUCKY, **environ) == every - {"forbidden"}
    assert await sent(OTEL_TRACES_SAMPLER="parentbased_always_off") == {"asked for"}
    assert await sent(
        OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0"
    ) == {"failed", "late", "moved", "asked for"}
    environ = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
    assert await sent(**environ) == {"failed", "late", "moved", "forbidden"}


async def test_a_request_without_a_trace_gets_one() -> None:
    async with served() as fake:
        fake.answers["/v1/traces"] = (200, "", b"")
        exporter = open_exporter(fake.url)
        entry = KeptStory(story(1, trace="", slo=FAILED), "frontend-1")
        exporter.add(entry)
        await flush(exporter)
        assert received(fake) == ["r-1"]
        assert entry.story.trace == make_trace_id("r-1")


async def test_clients_cannot_ask_for_more_than_a_rate() -> None:
    exporter = open_exporter("http://127.0.0.1:9")
    for number in range(5 * CLIENT_SAMPLED_PER_S):
        exporter.add(KeptStory(story(number, trace_flags=1), "frontend-1"))
    assert CLIENT_SAMPLED_PER_S <= len(exporter._pending) <= 3 * CLIENT_SAMPLED_PER_S


@pytest.mark.parametrize(
    ("answer", "why", "tries"),
    [
        ((500, "", b"{}"), "refused", 1),
        ((415, "", b""), "refused", 1),
        ((429, "retry-after: 0\r\n", b""), "unreachable", 3),
        ((503, "", b""), "unreachable", 3),
    ],
)
async def test_a_collector_that_refuses_costs_a_counter(
    answer: tuple[int, str, bytes],
    why: str,
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trace_export, "RETRY_S", 0.0)
    async with served() as fake:
        fake.answers["/v1/traces"] = answer
        exporter = open_exporter(fake.url)
        exporter.add(KeptStory(story(1, slo=FAILED), "frontend-1"))
        await flush(exporter)
        assert (exporter.dropped[why], len(fake.requests), exporter.sent) == (1, tries, 0)
    (record,) = caplog.records
    assert record.__dict__["fields"]["answer"] == f"HTTP {answer[0]}"


async def test_a_collector_that_is_away_or_hangs_costs_a_counter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_export, "RETRY_S", 0.0)
    async with served() as fake:
        fake.hangs = True
        exporter = open_exporter(fake.url, OTEL_EXPORTER_OTLP_TIMEOUT="50")
        exporter.add(KeptStory(story(1, slo=FAILED), "frontend-1"))
        await flush(exporter)
        url = fake.url
    assert exporter.dropped["unreachable"] == 1
    (record,) = caplog.records
    assert record.__dict__["fields"]["answer"] == "no answer within 0.05 s"
    exporter = open_exporter(url)
    for number in range(trace_export.MAX_PENDING + 5):
        exporter.add(KeptStory(story(number, slo=FAILED), "frontend-1"))
    assert exporter.dropped["queue_full"] == 5
    await flush(exporter)
    assert exporter.dropped["unreachable"] == trace_export.MAX_PENDING


async def test_nonsense_of_a_story_ends_no_export() -> None:
    async with served() as fake:
        fake.answers["/v1/traces"] = (200, "", b"")
        exporter = open_exporter(fake.url)
        exporter.add(KeptStory(story(1, slo=FAILED, trace="not hexadecimal"), "frontend-1"))
        await flush(exporter)
        exporter.add(KeptStory(story(2, slo=FAILED), "frontend-1"))
        await flush(exporter)
        assert (exporter.dropped["refused"], received(fake)) == (1, ["r-2"])


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc is not sent"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "wanted: http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "milliseconds"),
        ({ENDPOINT: "collector:4318"}, "such as http://127.0.0.1:4318"),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "wanted: parentbased_traceidratio"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "a share from 0 to 1",
        ),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TraceOptions.from_environ({ENDPOINT: "http://127.0.0.1:4318", **environ})


def test_without_the_library_a_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.proto.trace.v1", None)
    with pytest.raises(ConfigError, match="opentelemetry-proto is missing") as caught:
        TraceOptions.from_environ({ENDPOINT: "http://127.0.0.1:4318"})
    assert "pip install" in caught.value.hint
    assert TraceOptions.from_environ({}) is None


def test_the_resource_and_the_path_are_those_of_the_variables() -> None:
    options = TraceOptions.from_environ(
        {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://host/api/public/otel/v1/traces",
            "OTEL_SERVICE_NAME": "mine",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=other,team=a%2Cb",
        }
    )
    assert options is not None
    assert options.url == "https://host/api/public/otel/v1/traces"
    assert json.dumps(dict(options.resource)).count("mine") == 1
    assert options.resource["team"] == "a,b"
