"""HTTP statuses, headers and bodies of errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import Any

import msgspec

from dynamo.communication.http.errors import STATUS_BY_CODE as SERVER_STATUS_BY_CODE
from dynamo.core.errors import DynamoError, MethodNotAllowed, error_types

DONE_EVENT = b"data: [DONE]\n\n"
"""The end of OpenAI's streams of chats and completions."""
Headers = tuple[tuple[str, str], ...]

STATUS_BY_CODE = {
    **SERVER_STATUS_BY_CODE,
    "context_length_exceeded": 400,
    "unsupported": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "unsupported_media_type": 415,
    "slow_reader": 499,
    "internal_error": 500,
    "poisoned_request": 500,
    "model_not_ready": 503,
    "model_unavailable": 503,
    "no_workers": 503,
    "plane_away": 503,
    "store_unavailable": 503,
    "worker_failed": 503,
    "instance_gone": 503,
    "worker_leaving": 503,
    "transfer_failed": 503,
    "server_stopped": 503,
    "deadline_exceeded": 504,
}
ERROR_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
DEFAULT_RETRY_AFTER_S = 1.0
RETRY_HINT = "the request is valid: send it again"


def status_of(error: DynamoError) -> int:
    """Return the HTTP status of an error."""
    return status_of_type(type(error))


def status_of_type(error_type: type[DynamoError]) -> int:
    """Return the HTTP status of a class of errors; an unlisted code has that of its base class."""
    for cls in error_type.__mro__:
        status = STATUS_BY_CODE.get(getattr(cls, "code", ""))
        if status is not None:
            return status
    return 500


def statuses_by_code() -> dict[str, int]:
    """Return the HTTP status of each error code."""
    return {code: status_of_type(cls) for code, cls in error_types().items()}


def client_error_codes() -> frozenset[str]:
    """Return the codes of errors that clients make. A limit of the deployment is none of them."""
    own = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
    statuses = statuses_by_code()
    return frozenset(
        code for code, status in statuses.items() if status < 500 and status not in own
    )


class ErrorFormat(ABC):
    """Writes errors as an API's clients expect them.

    `request_id_headers`: headers with the request's id besides x-request-id.
    """

    request_id_headers: tuple[str, ...] = ()

    def status_of(self, error: DynamoError) -> int:
        """Return the HTTP status of an error."""
        return status_of(error)

    @abstractmethod
    def encode(self, error: DynamoError, request_id: str) -> bytes:
        """Return the JSON body of an answer."""

    @abstractmethod
    def encode_event(self, error: DynamoError, request_id: str) -> bytes:
        """Return the events that end a stream which has begun."""


class OpenAIErrorFormat(ErrorFormat):
    """Writes `{"error": {...}}`."""

    def encode(self, error: DynamoError, request_id: str) -> bytes:
        return msgspec.json.encode({"error": _error_body(error, request_id)})

    def encode_event(self, error: DynamoError, request_id: str) -> bytes:
        body = _error_body(error, request_id) | {"status": status_of(error)}
        return b"data: %b\n\n%b" % (msgspec.json.encode({"error": body}), DONE_EVENT)


def _error_body(error: DynamoError, request_id: str) -> dict[str, Any]:
    """Return OpenAI's error object, plus `hint` and `request_id`. In a stream it also has the HTTP
    `status` that the error would have had before it."""
    return {
        "message": error.message,
        "type": ERROR_TYPE_BY_STATUS.get(status_of(error), "invalid_request_error"),
        "code": error.code,
        "param": error.param,
        "hint": error.hint or (RETRY_HINT if error.retryable else None),
        "request_id": request_id or None,
    }


OPENAI_ERRORS = OpenAIErrorFormat()


class WrongMethod(MethodNotAllowed):
    """The route exists for other methods; `allowed` lists them, comma-separated."""

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"{path} does not take {method}", hint=f"use {allowed}")
        self.allowed = allowed


def error_headers(error: DynamoError) -> Headers:
    """Return the headers that belong to the status: allow, retry-after or www-authenticate."""
    status = status_of(error)
    if isinstance(error, WrongMethod):
        return (("allow", error.allowed),)
    if status in (429, 503):
        wait_s = error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_AFTER_S
        return (("retry-after", str(max(1, math.ceil(wait_s)))),)
    if status == 401:
        return (("www-authenticate", "Bearer"),)
    return ()
