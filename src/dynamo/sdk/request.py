"""The request that is being answered: it accompanies every call made for it."""

from __future__ import annotations

import secrets
from contextvars import ContextVar

from msgspec.structs import replace

from dynamo.core.context import Context

_current: ContextVar[Context | None] = ContextVar("dynamo_request", default=None)


def enter(context: Context) -> None:
    """This task answers that request."""
    _current.set(context)


def onward() -> Context:
    """What accompanies a call made now: the request being answered, else a new one."""
    context = _current.get()
    if context is None:
        return Context(request_id=secrets.token_hex(8))
    return replace(context, attempt=0, timeout_s=None) if context.attempt else context


def request_id() -> str:
    """The id of the request being answered; "" outside of one."""
    context = _current.get()
    return "" if context is None else context.request_id
