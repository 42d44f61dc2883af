"""The wire format of OpenTelemetry: spans as protobuf, by the library `opentelemetry-proto`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import dynamo
from dynamo.core.errors import ConfigError
from dynamo.core.installation import install_command
from dynamo.operations.observer.spans import SCHEMA_URL, TraceSpan

STATUS_ERROR = 2
REPEATED_TYPES = (str, int, bool)
UNIQUE = ("dynamo.request.id", "dynamo.client.request.id")
"""Attributes that differ from request to request."""
MAX_ENCODED = 4_096


class TracedRequest(NamedTuple):
    """The spans of a request, the id of its trace, and the client's tracestate."""

    trace_id: str
    state: str
    spans: Sequence[TraceSpan]


def load_trace_types() -> Any:
    """Return the types of spans. Raises `ConfigError` without the library."""
    try:
        from opentelemetry.proto.trace.v1 import trace_pb2
    except ImportError:
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and the package opentelemetry-proto is missing",
            hint=f"{install_command('otel')}, or set OTEL_SDK_DISABLED=true",
        ) from None
    return trace_pb2


class SpanEncoder:
    """Encodes the spans of requests as an ExportTraceServiceRequest. Raises `ConfigError` without
    the library. `resource`: attributes of the deployment."""

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._types: Any = load_trace_types()
        self._resource = resource

    def encode(self, requests: Iterable[TracedRequest]) -> bytes:
        """Return the message. Call in a thread: a request takes about 40 us."""
        types = self._types
        data = types.TracesData()
        resource = data.resource_spans.add(schema_url=SCHEMA_URL)
        for name, value in self._resource.items():
            resource.resource.attributes.add(key=name).value.string_value = value
        scope = resource.scope_spans.add(schema_url=SCHEMA_URL)
        scope.scope.name, scope.scope.version = "dynamo", dynamo.__version__
        for request in requests:
            trace_id = bytes.fromhex(request.trace_id)
            for span in request.spans:
                _fill(scope.spans.add(), span, trace_id, request.state)
        return bytes(data.SerializeToString())


def _fill(message: Any, span: TraceSpan, trace_id: bytes, state: str) -> None:
    message.trace_id = trace_id
    message.span_id = bytes.fromhex(span.span_id)
    message.name, message.kind = span.name, span.kind
    message.start_time_unix_nano, message.end_time_unix_nano = span.began_ns, span.ended_ns
    if span.parent_id:
        message.parent_span_id = bytes.fromhex(span.parent_id)
    if state:
        message.trace_state = state
    repeated = []
    for name, value in span.attributes.items():
        if type(value) in REPEATED_TYPES and name not in UNIQUE:
            repeated.append(_encode_attribute(name, value))
        else:
            _add_attribute(message.attributes, name, value)
    message.MergeFromString(b"".join(repeated))
    if span.error:
        message.status.code, message.status.message = STATUS_ERROR, span.error
    for event in span.events:
        added = message.events.add(name=event.name, time_unix_nano=event.at_ns)
        for name, value in event.attributes.items():
            _add_attribute(added.attributes, name, value)
    if span.link:
        message.links.add(trace_id=trace_id, span_id=bytes.fromhex(span.link))


def _add_attribute(target: Any, name: str, value: Any) -> None:
    shown = target.add(key=name).value
    kind = type(value)
    if kind is str:
        shown.string_value = value
    elif kind is int:
        shown.int_value = value
    elif kind is float:
        shown.double_value = value
    elif kind is bool:
        shown.bool_value = value
    else:
        for text in value:
            shown.array_value.values.add().string_value = text


@lru_cache(MAX_ENCODED, typed=True)
def _encode_attribute(name: str, value: Any) -> bytes:
    """Return a span that has only this attribute. Most requests have the same ones."""
    span = load_trace_types().Span()
    _add_attribute(span.attributes, name, value)
    return bytes(span.SerializeToString())
