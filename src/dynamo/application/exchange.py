"""One request and its response, with what every route needs to know about them."""

from __future__ import annotations

import os
import re
from itertools import count

from dynamo.application.http_errors import Headers, error_body, error_headers, status_of
from dynamo.application.openai.response_encoder import SSE_HEADERS as STREAM_HEADERS
from dynamo.application.openai.response_encoder import error_event
from dynamo.communication.http import Request, Response
from dynamo.core.errors import DynamoError

_FORBIDDEN_CHARACTERS = re.compile(r"[^A-Za-z0-9._:\-]")
MAX_REQUEST_ID_LENGTH = 128


class RequestIds:
    """Unique over processes: a random start, then a counter."""

    def __init__(self) -> None:
        self._process_prefix = os.urandom(8).hex()
        self._counter = count(1)

    def generate(self) -> str:
        """A fresh id."""
        return f"{self._process_prefix}{next(self._counter):08x}"

    def make_unique(self, given: str) -> str:
        """An id that begins with a client's own, which need not be unique."""
        return f"{given}-{self._process_prefix[:8]}{next(self._counter):x}"


def sanitise_request_id(given: str | None) -> str:
    """A client's x-request-id without what could hurt logs or headers; "" if nothing is left."""
    return _FORBIDDEN_CHARACTERS.sub("", given)[:MAX_REQUEST_ID_LENGTH] if given else ""


JSON_CONTENT_TYPE = ("content-type", "application/json")


class Exchange:
    """`headers` go with every answer; `shown_id` is the id that the client sees; `failed`: the
    status that tells how it ended, also in the middle of a stream."""

    __slots__ = (
        "client_request_id",
        "error_code",
        "error_status",
        "headers",
        "model",
        "request",
        "request_id",
        "response",
        "streaming",
    )

    def __init__(
        self, request: Request, response: Response, request_id: str, shown_id: str, headers: Headers
    ) -> None:
        self.request = request
        self.response = response
        self.request_id = request_id
        self.client_request_id = shown_id
        self.headers = (("x-request-id", shown_id), *headers)
        self.model = ""
        self.streaming = False
        self.error_status = 0
        self.error_code = ""

    def send_json(self, status: int, body: bytes, extra: Headers = ()) -> None:
        """The whole answer."""
        self.response.send(status, (JSON_CONTENT_TYPE, *self.headers, *extra), body)

    def start_stream(self, worker: str) -> None:
        """The head of a stream of events."""
        extra = (("x-dynamo-worker", worker),) if worker else ()
        self.response.start(200, (*STREAM_HEADERS, *self.headers, *extra))

    def send_error(self, error: DynamoError) -> None:
        """End with `error`: by status while nothing was sent, by an event after that."""
        self.error_status, self.error_code = status_of(error), error.code
        body = error_body(error, self.client_request_id)
        if not self.response.started:
            self.send_json(self.error_status, body, error_headers(error))
        elif not self.response.ended:
            self.response.end(error_event(body))
