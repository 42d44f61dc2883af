"""An HTTP request with its response, as every route sees it, and request ids."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import msgspec

from dynamo.application.http_errors import OPENAI_ERRORS, ErrorFormat, Headers, error_headers
from dynamo.communication.http import Request, Response
from dynamo.core.errors import DynamoError
from dynamo.telemetry.story import Story
from dynamo.telemetry.trace_context import TraceContext

_FORBIDDEN_CHARACTERS = re.compile(r"[^A-Za-z0-9._:\-]")
MAX_REQUEST_ID_LENGTH = 128


class RequestIds:
    """Generates ids that are unique over processes: a random prefix and a counter."""

    def __init__(self) -> None:
        self._process_prefix = os.urandom(8).hex()
        self._counter = count(1)

    def generate(self) -> str:
        """Return a new id."""
        return f"{self._process_prefix}{next(self._counter):08x}"

    def make_unique(self, client_id: str) -> str:
        """Return a unique id that begins with the client's own, which may repeat."""
        return f"{client_id}-{self._process_prefix[:8]}{next(self._counter):x}"


def sanitise_request_id(client_id: str | None) -> str:
    """Return a client's x-request-id without characters that could break logs or headers."""
    return _FORBIDDEN_CHARACTERS.sub("", client_id)[:MAX_REQUEST_ID_LENGTH] if client_id else ""


JSON_CONTENT_TYPE = ("content-type", "application/json")
STREAM_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


def compress(request: Request, body: bytes) -> tuple[Headers, bytes]:
    """Return the headers and the body of a large answer, compressed if the client takes that."""
    if "gzip" not in (request.header(b"accept-encoding") or ""):
        return (("vary", "accept-encoding"),), body
    headers = (("content-encoding", "gzip"), ("vary", "accept-encoding"))
    return headers, gzip.compress(body, 1)


class EventOutput(Protocol):
    """Where a reply writes the events of a stream, e.g. a `Response`, which describes the names."""

    open: bool
    started: bool
    overrun: bool
    congested: bool
    backlog_limit: int
    on_writable: Callable[[], None] | None
    on_silence: Callable[[float], None] | None

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were written and not yet taken."""

    def write(self, data: bytes) -> bool:
        """Write one event. False: nobody will read it."""

    def end(self, tail: bytes = b"") -> None:
        """Complete the stream with an optional last event."""


class Exchange:
    """A request, its response, and facts that are logged and counted when it ends.

    `output` takes the events of a stream, by default the response. `headers` are sent with every
    answer. `client_request_id` is the id that the client sees. `error_format` writes errors.
    `error_status` is the HTTP status of an error, also of one in the middle of a stream; 0: none.
    `started_s`: the request was there, in seconds of the process's clock. `load_s`: it waited for
    its model to be loaded. `story`: the one that was opened for it. `holds_story`: it lasts longer
    than the generation of text. `trace`: that of the client, or one that begins here.
    """

    def __init__(
        self,
        request: Request,
        response: Response,
        request_id: str,
        client_request_id: str,
        headers: Headers,
    ) -> None:
        self.request = request
        self.response = response
        self.output: EventOutput = response
        self.request_id = request_id
        self.client_request_id = client_request_id
        self.headers = (("x-request-id", client_request_id), *headers)
        self.error_format: ErrorFormat = OPENAI_ERRORS
        self.model = ""
        self.streaming = False
        self.error_status = 0
        self.error_code = ""
        self.started_s = self.load_s = 0.0
        self.story: Story | None = None
        self.holds_story = False
        self.trace: TraceContext | None = None

    def use_error_format(self, error_format: ErrorFormat) -> None:
        """Write errors as the clients of another API expect them."""
        self.error_format = error_format
        for header in error_format.request_id_headers:
            self.headers += ((header, self.client_request_id),)

    def join_trace(self, trace: TraceContext) -> None:
        """Be part of a trace, and tell the client so."""
        self.trace = trace
        self.headers += trace.answer_headers()

    def send(self, content_type: str, body: bytes) -> None:
        """Send a complete answer of any type."""
        self.response.send(200, (("content-type", content_type), *self.headers), body)

    def send_value(self, value: Any) -> None:
        """Send a value as a complete JSON answer."""
        self.send_json(200, msgspec.json.encode(value))

    def send_json(self, status: int, body: bytes, extra: Headers = ()) -> None:
        """Send a complete JSON answer."""
        self.response.send(status, (JSON_CONTENT_TYPE, *self.headers, *extra), body)

    def start_stream(self, worker: str, prefill_worker: str = "") -> None:
        """Send the head of an event stream, unless it was sent while the model was loaded."""
        if self.response.started:
            return
        if prefill_worker:
            extra = worker_headers(worker, prefill_worker)
        else:
            extra = (("x-dynamo-worker", worker),) if worker else ()
        self.response.start(200, (*STREAM_HEADERS, *self.headers, *extra))

    def send_error(self, error: DynamoError) -> None:
        """Answer with an error: by HTTP status if nothing was sent yet, otherwise by an event."""
        error_format, request_id = self.error_format, self.client_request_id
        self.error_status, self.error_code = error_format.status_of(error), error.code
        if not self.response.started:
            body = error_format.encode(error, request_id)
            self.send_json(self.error_status, body, error_headers(error))
        elif not self.response.ended:
            self.response.end(error_format.encode_event(error, request_id))


def worker_headers(worker: str, prefill_worker: str) -> Headers:
    """Return the headers that name the workers of an answer and of its prompt, where known."""
    names = (("x-dynamo-worker", worker), ("x-dynamo-prefill-worker", prefill_worker))
    return tuple(header for header in names if header[1])
