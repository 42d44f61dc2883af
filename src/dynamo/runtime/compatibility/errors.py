"""Errors of programs against NVIDIA Dynamo's bindings, as errors of this project."""

from __future__ import annotations

from typing import NoReturn

from dynamo.core.errors import (
    ConfigError,
    DynamoError,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthorized,
    Unsupported,
)

ERROR_BY_STATUS: dict[int, type[DynamoError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    413: TooLarge,
    429: Overloaded,
    503: Overloaded,
}
"""The error that stands for an HTTP status; other statuses have that of their class, 400 or 500."""


class HttpError(Exception):
    """A handler's own answer to a request that fails: an HTTP status and a message."""

    def __init__(self, code: int, message: str) -> None:
        if not isinstance(code, int) or not 0 <= code < 600 or not isinstance(message, str):
            raise ValueError(f"HttpError takes a status below 600 and a text, not {code!r}")
        self.code = code
        self.message = message
        super().__init__(f"HTTP {code}: {message}")


class RefusedByHandler(InvalidRequest, ValueError):
    """A handler has refused the request: a `ValueError` there, and for its caller."""


class MissingName(Unsupported, AttributeError):
    """An attribute of NVIDIA Dynamo's classes that does not exist here."""


def handler_error(error: Exception) -> Exception:
    """Return the error of a call whose handler raised `error`."""
    if isinstance(error, HttpError):
        kind = ERROR_BY_STATUS.get(error.code)
        if kind is None:
            kind = InvalidRequest if 400 <= error.code < 500 else InternalError
        return kind(error.message)
    if isinstance(error, ValueError) and not isinstance(error, DynamoError):
        return InvalidRequest(f"{type(error).__name__}: {error}")
    return error


def refuse_name(owner: str, name: str) -> NoReturn:
    """Raise `MissingName` for an attribute of `owner`."""
    raise MissingName(
        f"{owner}.{name} of NVIDIA Dynamo does not exist here",
        hint="the page how-to/migrate lists what does; runtime.native is this project's runtime",
    )


def static_error() -> ConfigError:
    """Return the error for workers without discovery."""
    return ConfigError(
        "static=True: workers without discovery do not exist here",
        hint="leave static out: the default discovery needs no server",
    )
