"""What can go wrong: no connection, or an answer that is an error."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_MESSAGE_CHARACTERS = 300
STATUS_HINTS = {
    401: "pass the server's key: DynamoConfig(api_key=...)",
    403: "this key may not do that",
    404: "is base_url the root of a server that speaks OpenAI's API?",
}


class DynamoError(Exception):
    """Base of all. `hint`: what to do about it, "" where nothing is known."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DynamoConnectionError(DynamoError):
    """The server could not be reached, or the connection broke."""


class DynamoCertificateError(DynamoConnectionError):
    """The server's certificate is not trusted. Never tried again."""


class DynamoTimeoutError(DynamoConnectionError):
    """The server took longer than `timeout`. Never tried again: it may be at work still."""


class DynamoAPIError(DynamoError):
    """The server answered with an error. `status`: the HTTP status (200 where a stream had begun),
    `body`: what it sent, `code`: what a program tests, `retry_after_s`: when to come back."""

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
    """The error that a body tells, in OpenAI's shape or any other."""
    text = body.decode(errors="replace")
    told = _parse_error_body(body)
    message = str(told.get("message") or text[:MAX_MESSAGE_CHARACTERS] or "no reason given")
    code = told.get("code")
    if isinstance(code, int) and status < 400:
        status = code
    return DynamoAPIError(
        f"{message} (status {status})",
        status=status,
        body=text,
        code=str(code or told.get("type") or ""),
        request_id=str(told.get("request_id") or request_id),
        hint=str(told.get("hint") or ("" if told else STATUS_HINTS.get(status, ""))),
        retry_after_s=retry_after_s,
    )


def _parse_error_body(body: bytes) -> dict[str, Any]:
    try:
        whole = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if not isinstance(whole, dict):
        return {}
    error = whole.get("error", whole)
    if isinstance(error, dict):
        return error
    return {"message": error}
