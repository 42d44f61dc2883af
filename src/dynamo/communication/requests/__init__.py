"""Call one instance, stream back, cancel: the request plane. Backends: `memory:`, `tcp:`."""

from dynamo.communication.requests.plane import (
    CallInfo,
    FlowWindow,
    RequestHandler,
    Requests,
    ResponseWriter,
    Sink,
    open_requests,
)

__all__ = [
    "CallInfo",
    "FlowWindow",
    "RequestHandler",
    "Requests",
    "ResponseWriter",
    "Sink",
    "open_requests",
]
