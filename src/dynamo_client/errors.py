"""Errors of the client: failed connections and error responses."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_MESSAGE_CHARACTERS = 300
STATUS_HINTS = {
    401: "pass the server's key: DynamoConfig(api_key=...)",
    403: "the key does not permit this request",
    404: "base_url must be the root of a server with OpenAI's API",
}


class DynamoError(Exception):
    """The base of all errors. `hint` says what to do, or is empty."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DynamoConnectionError(DynamoError):
    """The server could not be reached, or the connection broke."""


class DynamoCertificateError(DynamoConnectionError):
    """The server's certificate is not trusted. The call is not retried."""


class DynamoTimeoutError(DynamoConnectionError):
    """The server took longer than `timeout`. The call is not retried: it may still be running."""


class DynamoAPIError(DynamoError):
    """The server answered with an error. `status` is the HTTP status (in a stream the error's own,
    200 if the server names none), `body` the text of the response. `code` identifies the error to
    programs. `retry_after_s` is the value of Retry-After."""

    def __init__(
        self,
        message: str = "",
        *,
        status: int = 0,
        body: str = "",
        code: str = "",
        request_id: str = "",
        hint: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.body = body
        self.code = code
        self.request_id = request_id
        self.retry_after_s = retry_after_s


def api_error(
    status: int, body: bytes, *, request_id: str = "", retry_after_s: float | None = None
) -> DynamoAPIError:
    """Build the error of a response body, in OpenAI's format or any other."""
    text = body.decode(errors="replace")
    fields = _parse_error_body(body)
    message = str(fields.get("message") or text[:MAX_MESSAGE_CHARACTERS] or "no reason given")
    code = fields.get("code")
    own_statuses = (value for value in (fields.get("status"), code) if isinstance(value, int))
    if status < 400:
        status = next(own_statuses, status)
    return DynamoAPIError(
        f"{message} (status {status})",
        status=status,
        body=text,
        code=str(code or fields.get("type") or ""),
        request_id=str(fields.get("request_id") or request_id),
        hint=str(fields.get("hint") or ("" if fields else STATUS_HINTS.get(status, ""))),
        retry_after_s=retry_after_s,
    )


def _parse_error_body(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if not isinstance(decoded, dict):
        return {}
    error = decoded.get("error", decoded)
    return error if isinstance(error, dict) else {"message": error}
