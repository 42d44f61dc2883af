"""Failures of the API server, as Kubernetes words them in a `Status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    504: "Timeout",
}


class WrongField(NamedTuple):
    """The fault of one field. `reason` is the one that Kubernetes has for it."""

    field: str
    reason: str
    message: str

    @property
    def text(self) -> str:
        """The sentence about the field in a `Status`."""
        return f"{self.field}: {self.message}"


class ApiFailure(Exception):
    """A request that the API server answers with a `Status` of kind Failure."""

    def __init__(
        self,
        code: int,
        message: str,
        reason: str = "",
        *,
        causes: Sequence[WrongField] = (),
        about: tuple[str, str, str] = ("", "", ""),
        retry_after_s: int = 0,
    ) -> None:
        """`about`: group, kind or plural, and name of the object."""
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        group, kind, name = about
        details: dict[str, Any] = {"name": name, "group": group, "kind": kind}
        if causes:
            details["causes"] = [
                {"reason": cause.reason, "message": cause.message, "field": cause.field}
                for cause in causes
            ]
        if retry_after_s:
            details["retryAfterSeconds"] = retry_after_s
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason or REASONS.get(code, ""),
            "details": {key: value for key, value in details.items() if value},
            "code": code,
        }


def invalid(group: str, kind: str, name: str, causes: Sequence[WrongField]) -> ApiFailure:
    """Return the 422 for an object with wrong fields."""
    texts = [cause.text for cause in causes]
    joined = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    full = f"{kind}.{group}" if group else kind
    message = f'{full} "{name}" is invalid: {joined}'
    return ApiFailure(422, message, causes=causes, about=(group, kind, name))


def not_found(group: str, plural: str, name: str) -> ApiFailure:
    """Return the 404 for an object."""
    full = f"{plural}.{group}" if group else plural
    return ApiFailure(404, f'{full} "{name}" not found', about=(group, plural, name))


def expired(message: str) -> ApiFailure:
    """Return the 410 for a resource version of which the server has no history."""
    return ApiFailure(410, message)
