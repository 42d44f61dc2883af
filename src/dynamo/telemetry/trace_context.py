"""W3C Trace Context: the trace of a request, taken over from its client and passed on.

Ids of spans are made from names that each process knows. No id travels with a request: a worker
finds that of its attempt, and the observer makes the spans after the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from dynamo.core.context import Context

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_TRACE_BYTES = 256
MAX_STATE_BYTES = 512
"""A longer header is ignored."""
SAMPLED = 1
_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(rb"[\x20-\x7e]+")


class TraceContext(msgspec.Struct, frozen=True):
    """The trace of a request. `parent_id`: the client's span; "" if the trace begins here. `flags`:
    the client's, else None. `header`: the traceparent for what is called for the request."""

    trace_id: str
    parent_id: str
    flags: int | None
    state: str
    header: str

    def answer_headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers of the answer."""
        if self.state:
            return ((TRACEPARENT, self.header), (TRACESTATE, self.state))
        return ((TRACEPARENT, self.header),)


def make_span_id(name: str) -> str:
    """Return the id of the span of a name that no other span has."""
    return _make_ids(name)[32:]


def make_trace_id(request_id: str) -> str:
    """Return the id of the trace of a request whose client has none."""
    return _make_ids(request_id)[:32]


def _make_ids(name: str) -> str:
    """Return the id of a trace (32 characters) that begins here, and that of its root."""
    return blake2b(name.encode(), digest_size=24).hexdigest()


def attempt_key(context: Context, choice: int) -> str:
    """Return the name of an attempt."""
    return f"{context.request_id}/{choice}/{context.attempt}"


def is_chosen(trace_id: str, ratio: float) -> bool:
    """Return whether the trace of a client belongs to a share of all traces."""
    return int(trace_id[-14:-6], 16) < ratio * (1 << 32)


def begin_trace(request_id: str) -> TraceContext:
    """Begin the trace of a request. The observer makes the same id if it exports one that has no
    trace."""
    ids = _make_ids(request_id)
    trace_id = ids[:32]
    return TraceContext(trace_id, "", None, "", f"00-{trace_id}-{ids[32:]}-01")


def take_over_trace(
    headers: Mapping[bytes, bytes], request_id: str, *, exported: bool
) -> TraceContext | None:
    """Return the trace of the client; None if it has none. `exported`: our spans are part of it."""
    sent = headers.get(b"traceparent", b"")
    match = _HEADER.fullmatch(sent) if sent and len(sent) <= MAX_TRACE_BYTES else None
    if match is None:
        return None
    version, trace, parent, flags_text, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest) or not trace.strip(b"0"):
        return None
    if not parent.strip(b"0"):
        return None
    state = headers.get(b"tracestate", b"")
    if len(state) > MAX_STATE_BYTES or not _STATE.fullmatch(state):
        state = b""
    trace_id, parent_id, flags = trace.decode(), parent.decode(), int(flags_text, 16)
    header = sent.decode()
    if exported:
        header = f"00-{trace_id}-{make_span_id(request_id)}-{flags & SAMPLED:02x}"
    return TraceContext(trace_id, parent_id, flags, state.decode(), header)


def trace_headers(context: Context, choice: int, *, exported: bool) -> dict[str, str]:
    """Return the headers for what an engine calls in an attempt. `exported`: the attempt has a
    span, below which the engine's are. The header of a request that is not chosen says so, since an
    engine that exports spans begins a trace of its own where there is no header."""
    if not context.trace:
        if not exported:
            return {}
        span_id = make_span_id(attempt_key(context, choice))
        return {TRACEPARENT: f"00-{make_trace_id(context.request_id)}-{span_id}-00"}
    headers = {TRACEPARENT: context.trace}
    if exported and (parts := context.trace.split("-"))[3:]:
        parts[2] = make_span_id(attempt_key(context, choice))
        headers[TRACEPARENT] = "-".join(parts)
    if state := context.metadata.get(TRACESTATE):
        headers[TRACESTATE] = state
    return headers


def exports_traces(environ: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variables name a collector."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environ.get(name) for name in names)
