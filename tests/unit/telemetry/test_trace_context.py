"""Traces of clients are taken over, and what is no trace is ignored."""

from __future__ import annotations

import pytest

from dynamo.core.context import Context
from dynamo.telemetry.trace_context import (
    begin_trace,
    exports_traces,
    is_chosen,
    make_span_id,
    make_trace_id,
    take_over_trace,
    trace_headers,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"{HEADER}, {HEADER}",  # two headers
        f"01-{TRACE}-{SPAN}-01-{'x' * 300}",
        f"{HEADER}\u00e9",
    ],
)
def test_garbage_is_no_trace(header: str) -> None:
    headers = {b"traceparent": header.encode("latin-1"), b"tracestate": b"a=1"}
    assert take_over_trace(headers, "r", exported=True) is None


def test_a_trace_is_passed_on_as_it_is_where_nothing_is_exported() -> None:
    headers = {b"traceparent": HEADER.encode(), b"tracestate": b"vendor=a:b,other=c"}
    trace = take_over_trace(headers, "r", exported=False)
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.flags) == (TRACE, SPAN, 1)
    assert trace.answer_headers() == (
        ("traceparent", HEADER),
        ("tracestate", "vendor=a:b,other=c"),
    )
    context = Context("r", trace=trace.header, metadata={"tracestate": trace.state})
    passed = trace_headers(context, 0, exported=False)
    assert passed == {"traceparent": HEADER, "tracestate": "vendor=a:b,other=c"}
    assert trace_headers(Context("r"), 0, exported=False) == {}


def test_spans_of_engines_are_below_the_attempt() -> None:
    trace = take_over_trace({b"traceparent": HEADER[:-1].encode() + b"0"}, "r", exported=True)
    assert trace is not None
    assert trace.header == f"00-{TRACE}-{make_span_id('r')}-00"
    passed = trace_headers(Context("r", attempt=3, trace=trace.header), 2, exported=True)
    assert passed == {"traceparent": f"00-{TRACE}-{make_span_id('r/2/3')}-00"}


def test_engines_are_told_which_requests_are_not_chosen() -> None:
    passed = trace_headers(Context("r", attempt=1), 0, exported=True)
    assert passed == {"traceparent": f"00-{make_trace_id('r')}-{make_span_id('r/0/1')}-00"}


def test_a_later_version_is_read_like_this_one_and_a_giant_state_is_left_out() -> None:
    headers = {b"traceparent": f"42-{TRACE}-{SPAN}-03-more".encode(), b"tracestate": b"a" * 600}
    trace = take_over_trace(headers, "r", exported=False)
    assert trace is not None
    assert (trace.trace_id, trace.flags, trace.state) == (TRACE, 3, "")


def test_a_trace_that_begins_here_has_the_ids_that_others_make() -> None:
    trace = begin_trace("r")
    assert (trace.trace_id, trace.parent_id, trace.flags) == (make_trace_id("r"), "", None)
    assert trace.header == f"00-{make_trace_id('r')}-{make_span_id('r')}-01"
    assert begin_trace("s").trace_id != trace.trace_id


def test_a_share_of_the_traces_of_clients_is_chosen() -> None:
    chosen = [is_chosen(make_trace_id(str(number)), 0.1) for number in range(2_000)]
    assert 140 < sum(chosen) < 260


@pytest.mark.parametrize(
    ("environ", "exported"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "True"}, False),
    ],
)
def test_a_collector_is_named_by_the_usual_variables(
    environ: dict[str, str], exported: bool
) -> None:
    assert exports_traces(environ) is exported
