"""The current request of a task. Its id and deadline accompany every call made for it."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.errors import DeadlineExceeded


class _CurrentRequest(NamedTuple):
    """A request in work. `deadline_s` is a time of the clock `now`; None: no deadline."""

    context: Context
    deadline_s: float | None
    now: Callable[[], float]


_REQUEST_ID_PREFIX = secrets.token_hex(8)
_request_counter = itertools.count(1)
_current_request: ContextVar[_CurrentRequest | None] = ContextVar("dynamo_request", default=None)


def set_current_request(context: Context, now: Callable[[], float]) -> None:
    """Make `context` the current request of this task."""
    limit = context.timeout_s
    _current_request.set(_CurrentRequest(context, None if limit is None else now() + limit, now))


def derive_context() -> Context:
    """Return the context for a call made now: the current request's with the time left, else new.

    Raises `DeadlineExceeded` if no time is left.
    """
    current = _current_request.get()
    if current is None:
        return Context(request_id=f"{_REQUEST_ID_PREFIX}{next(_request_counter):08x}")
    context = current.context
    if not context.attempt and current.deadline_s is None:
        return context
    left = time_left()
    if left is not None and left <= 0:
        raise DeadlineExceeded("no time is left for another call")
    return replace(context, attempt=0, timeout_s=left)


def request_id() -> str:
    """Return the id of the current request; "" outside of a request."""
    current = _current_request.get()
    return "" if current is None else current.context.request_id


def time_left() -> float | None:
    """Return the seconds until the deadline of the current request; None without a deadline."""
    current = _current_request.get()
    if current is None or current.deadline_s is None:
        return None
    return current.deadline_s - current.now()
