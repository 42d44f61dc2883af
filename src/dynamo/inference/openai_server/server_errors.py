"""Errors of another server as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.communication.http.client import HttpAnswer
from dynamo.core.errors import (
    ContextLengthExceeded,
    DynamoError,
    Forbidden,
    InvalidRequest,
    Overloaded,
    Unauthorized,
    UpstreamFailed,
)
from dynamo.inference.openai_server.foreign_values import (
    decode_value,
    read_index,
    read_text,
    shorten,
)

MAX_RETRY_AFTER_S = 86_400.0
"""A server that names a longer time means this one."""
STATUS_BY_WORD = {
    429: ("rate_limit", "ratelimit", "quota", "overloaded", "too_many", "toomany", "exhausted"),
    401: ("authentication", "invalid_api_key", "unauthorized", "unauthenticated"),
    403: ("permission", "forbidden"),
    400: (
        *("invalid_request", "badrequest", "bad_request", "context_length", "invalid_argument"),
        *("exceed_context_size", "validation", "content_filter"),
    ),
}
"""The status of an error in a stream, by words of its code or type."""


def check_answer(answer: HttpAnswer) -> None:
    """Raise the error of an answer that is not 200."""
    if answer.status != 200:
        raise map_error(answer.status, answer.body, answer.headers)


def find_error(event: Any, kind: bytes = b"") -> Any:
    """Return the error that an event is or has, or None. `kind`: the event's name."""
    if isinstance(event, list):  # Gemini's errors are lists of one
        event = event[0] if event else None
    if not isinstance(event, dict):
        return event if kind == b"error" and event else None
    # OpenAI's error, in the event or in its first choice.
    if error := event.get("error"):
        return error if isinstance(error, dict) else event
    choices = event.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0].get("error") or None
    # Events that are an error: by name, object or type, or by the fields of FastAPI and TGI.
    if kind == b"error" or event.get("object") == "error" or event.get("type") == "error":
        return event
    if "detail" in event or "error_type" in event:
        return event
    return None


def event_error(error: Any) -> DynamoError:
    """Return the error of an event. Its status stands in the code, or follows from words."""
    fields = error if isinstance(error, dict) else {}
    for name in ("code", "status_code", "status", "http_status"):
        status = read_index(fields.get(name))
        if status is not None and 400 <= status < 600:
            return map_error(status, msgspec.json.encode(error), {})
    words = _words(fields)
    statuses = (
        status for status, parts in STATUS_BY_WORD.items() if any(part in words for part in parts)
    )
    return map_error(next(statuses, 500), msgspec.json.encode(error), {})


def map_error(status: int, body: bytes, headers: Mapping[str, str]) -> DynamoError:
    """Return the error of a server as one of ours. 429 and 503 keep their Retry-After. No 4xx
    is a `WorkerFailed`, since the server is alive. `Unauthorized` and `Forbidden` concern the key.
    """
    message, words = _message(body)
    if status in {429, 503}:
        after = _retry_after_s(headers.get("retry-after", ""))
        return Overloaded(f"the server is overloaded: {message}", retry_after_s=after)
    if status in {400, 413, 422}:
        too_long = "context" in words or "context length" in message or "context size" in message
        return (ContextLengthExceeded if too_long else InvalidRequest)(message)
    if status in {401, 403}:
        refusal = f"the server refuses the key ({status}): {message}"
        return (Unauthorized if status == 401 else Forbidden)(refusal)
    if status in {408, 409, 425}:
        return Overloaded(f"the server asks to send the request again ({status}): {message}")
    if 400 <= status < 500:
        return InvalidRequest(f"the server refuses the request ({status}): {message}")
    if 300 <= status < 400:
        return UpstreamFailed(f"the server answers {status}, a redirect, which is not followed")
    return UpstreamFailed(f"the server answers {status}: {message}")


def _message(body: bytes) -> tuple[str, str]:
    """Return what the body of an error says, and its words for programs."""
    text = body.decode("utf-8", "replace")
    try:
        value = decode_value(body)
    except ValueError:
        return shorten(text), ""
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return shorten(text), ""
    error = value.get("error") or value
    if isinstance(error, str):
        return shorten(error), _words(value)
    if not isinstance(error, dict):
        return shorten(text), ""
    for name in ("message", "error", "detail", "msg"):
        value = error.get(name)
        if message := read_text(value) or (value and msgspec.json.encode(value).decode()):
            return shorten(message), _words(error)
    return shorten(text), _words(error)


def _words(error: Mapping[str, Any]) -> str:
    names = ("code", "type", "status", "error_type")
    return " ".join(str(error.get(name) or "") for name in names).lower()


def _retry_after_s(text: str) -> float | None:
    """Return the seconds of a Retry-After, or None. Dates and what is no number name none."""
    if len(text) > 400 or not text.replace(".", "", 1).isdecimal() or not text.isascii():
        return None
    return min(float(text), MAX_RETRY_AFTER_S)
