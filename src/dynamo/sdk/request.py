"""The request that is being answered: it accompanies every call made for it."""

from __future__ import annotations

import itertools
import secrets
from contextvars import ContextVar

from msgspec.structs import replace

from dynamo.core.context import Context

_PROCESS = secrets.token_hex(8)
_numbers = itertools.count(1)
_current: ContextVar[Context | None] = ContextVar("dynamo_request", default=None)


def enter(context: Context) -> None:
    """This task answers that request."""
    _current.set(context)


def onward() -> Context:
    """What accompanies a call made now: the request being answered, else a new one."""
    context = _current.get()
    if context is None:
        return Context(request_id=f"{_PROCESS}{next(_numbers):08x}")
    if context.attempt or context.timeout_s is not None:  # neither is that of the next call
        return replace(context, attempt=0, timeout_s=None)
    return context


def request_id() -> str:
    """The id of the request being answered; "" outside of one."""
    context = _current.get()
    return "" if context is None else context.request_id
