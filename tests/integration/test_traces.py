"""A deployment exports the traces of its requests: whole trees, also of requests that moved."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.faults.cluster import Cluster
from tests.support.fake_openai_server import FakeServer, served
from tests.unit.observer.test_spans import assert_is_tree, attributes

CHAT = (
    b'{"model": "tiny", "max_tokens": 4, "temperature": 0.25, '
    b'"messages": [{"role": "user", "content": "hello"}]}'
)
PARENT = "00f067aa0ba902b7"


def read_traces(fake: FakeServer) -> dict[str, list[Any]]:
    """Return the spans that the collector has received, by trace."""
    traces = defaultdict[str, list[Any]](list)
    for path, body in zip(fake.requests, fake.bodies, strict=True):
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in resource.scope_spans[0].spans:
                traces[span.trace_id.hex()].append(span)
    return traces


def ask_with(cluster: Cluster, trace: str) -> dict[str, str]:
    """Send a chat with these headers, and return those of the answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.port}/v1/chat/completions",
        CHAT,
        {"content-type": "application/json", "traceparent": trace, "tracestate": "v=1"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return {name.lower(): value for name, value in answer.headers.items()}


async def test_traces_are_whole_trees(tiny_model: Path, tmp_path: Path) -> None:
    wanted, forbidden, garbage = ("a" * 32, "b" * 32, "c" * 32)
    async with served() as fake:
        fake.answers["/v1/traces"] = (200, "content-type: application/json\r\n", b"{}")
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": fake.url, "OTEL_SERVICE_NAME": "mine"}
        with Cluster(
            tiny_model, tmp_path, workers=2, flags=("--observer",), environ=environ
        ) as cluster:
            headers = await asyncio.to_thread(ask_with, cluster, f"00-{wanted}-{PARENT}-01")
            answered = headers["traceparent"].split("-")
            assert (answered[1], answered[3], headers["tracestate"]) == (wanted, "01", "v=1")
            await asyncio.to_thread(ask_with, cluster, f"00-{forbidden}-{PARENT}-00")
            headers = await asyncio.to_thread(ask_with, cluster, f"00-{garbage}-{PARENT}")
            assert "tracestate" not in headers
            assert garbage not in headers.get("traceparent", "")

            async def kill() -> None:
                cluster.kill("worker")

            answers = await cluster.ask_during(kill, streams=8, tokens=40)
            assert all(answer.complete for answer in answers)
            moved: list[list[Any]] = []
            while not moved or wanted not in read_traces(fake):
                await asyncio.sleep(0.2)
                moved = [
                    spans
                    for spans in read_traces(fake).values()
                    if attributes(spans[0])["dynamo.moves"]
                ]
            traces = read_traces(fake)
            shown = await cluster.command("why", wanted)
    assert f"trace    {wanted}" in shown
    assert forbidden not in traces
    for spans in traces.values():
        assert_is_tree(spans)
    chosen = traces[wanted]
    names = [span.name for span in chosen]
    assert names[0] == "chat tiny"
    assert {"tokenise", "prefill", "decode"} <= set(names)
    assert chosen[0].parent_span_id.hex() == PARENT
    assert chosen[0].span_id.hex() == answered[2]
    facts = attributes(chosen[0])
    assert facts["gen_ai.request.temperature"] == 0.25
    assert facts["gen_ai.usage.output_tokens"] == 4
    for spans in moved:
        tries = [span for span in spans if span.name.startswith("generate worker-")]
        assert len(tries) == 2
        assert tries[0].status.code == 2
        assert tries[1].links[0].span_id == tries[0].span_id
        assert [event.name for event in spans[0].events] == ["moved"]
