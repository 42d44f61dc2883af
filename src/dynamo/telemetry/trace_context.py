"""W3C Trace Context: the trace of a request, taken over from its client and passed on.

Ids of spans are made from names that each process knows. No id travels with a request: a worker
finds that of its attempt, and the observer makes the spans after the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from zlib import crc32

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
    return _make_ids(name, 0)[32:]


def make_trace_id(request_id: str) -> str:
    """Return the id of the trace of a request whose client has none."""
    return _make_ids(request_id, _mix(request_id))[:32]


def _make_ids(name: str, mixed: int) -> str:
    """Return the id of a trace (32 characters) that begins here, and that of its root."""
    digest = blake2b(name.encode(), digest_size=20).digest()
    return (digest[:9] + mixed.to_bytes(4, "big") + digest[9:]).hex()


def _mix(request_id: str) -> int:
    """Return the 32 bits by which `is_chosen` chooses. For most requests they are all that is made
    of a trace, so that they are no hash of cryptography."""
    return crc32(request_id.encode()) * 0x9E3779B1 & 0xFFFFFFFF


def attempt_key(context: Context, choice: int) -> str:
    """Return the name of an attempt."""
    return f"{context.request_id}/{choice}/{context.attempt}"


def is_chosen(trace_id: str, ratio: float) -> bool:
    """Return whether a trace belongs to a share of all traces, the same in each process."""
    return int(trace_id[-14:-6], 16) < ratio * (1 << 32)


def take_over_trace(
    headers: Mapping[bytes, bytes], request_id: str, ratio: float | None
) -> TraceContext | None:
    """Return the trace of a request. Without one of its client, a share `ratio` of all requests
    begins one here, and the others have None. `ratio` is None where no spans are exported."""
    sent = headers.get(b"traceparent", b"")
    match = _HEADER.fullmatch(sent) if sent and len(sent) <= MAX_TRACE_BYTES else None
    if match is not None:
        version, trace, parent, flags_text, rest = match.groups()
        is_wrong = version == b"ff" or (version == b"00" and rest) or not trace.strip(b"0")
        match = None if is_wrong or not parent.strip(b"0") else match
    if match is None:
        if ratio is None:
            return None
        mixed = _mix(request_id)
        if mixed >= ratio * (1 << 32):
            return None  # the observer makes the same id if it exports the request all the same
        ids = _make_ids(request_id, mixed)
        trace_id = ids[:32]
        header = f"00-{trace_id}-{ids[32:]}-01"
        return TraceContext(trace_id, "", None, "", header)
    state = headers.get(b"tracestate", b"")
    if len(state) > MAX_STATE_BYTES or not _STATE.fullmatch(state):
        state = b""
    trace_id, parent_id, flags = trace.decode(), parent.decode(), int(flags_text, 16)
    header = sent.decode()
    if ratio is not None:
        header = f"00-{trace_id}-{make_span_id(request_id)}-{flags & SAMPLED:02x}"
    return TraceContext(trace_id, parent_id, flags, state.decode(), header)


def trace_headers(context: Context, choice: int, *, exported: bool) -> dict[str, str]:
    """Return the headers for what an engine calls in an attempt. `exported`: the attempt has a
    span, below which the engine's are."""
    if not context.trace:
        return {}
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
