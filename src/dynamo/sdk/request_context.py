"""The request that is being answered: it accompanies every call made for it."""

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
    """`until`: by the clock `now` the time when it must be over; None: any."""

    context: Context
    deadline_s: float | None
    now: Callable[[], float]


_REQUEST_ID_PREFIX = secrets.token_hex(8)
_request_counter = itertools.count(1)
_current_request: ContextVar[_CurrentRequest | None] = ContextVar("dynamo_request", default=None)


def set_current_request(context: Context, now: Callable[[], float]) -> None:
    """This task answers that request."""
    limit = context.timeout_s
    _current_request.set(_CurrentRequest(context, None if limit is None else now() + limit, now))


def derive_context() -> Context:
    """What accompanies a call made now: the request being answered, with the time that is left of
    it, else a new one. Raises `DeadlineExceeded` where none is left."""
    answering = _current_request.get()
    if answering is None:
        return Context(request_id=f"{_REQUEST_ID_PREFIX}{next(_request_counter):08x}")
    context = answering.context
    if not context.attempt and answering.deadline_s is None:
        return context
    left = time_left()
    if left is not None and left <= 0:
        raise DeadlineExceeded("no time is left for another call")
    return replace(context, attempt=0, timeout_s=left)


def request_id() -> str:
    """The id of the request being answered; "" outside of one."""
    answering = _current_request.get()
    return "" if answering is None else answering.context.request_id


def time_left() -> float | None:
    """Seconds until the request being answered must be over; None: nobody said."""
    answering = _current_request.get()
    if answering is None or answering.deadline_s is None:
        return None
    return answering.deadline_s - answering.now()
