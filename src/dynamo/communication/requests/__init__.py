"""The request plane: calls with streamed answers. Backends: `memory:`, `tcp:`, `nats:`."""

from dynamo.communication.requests.plane import (
    FlowWindow,
    RequestHandler,
    Requests,
    ResponseWriter,
    Sink,
    open_requests,
)

__all__ = [
    "FlowWindow",
    "RequestHandler",
    "Requests",
    "ResponseWriter",
    "Sink",
    "open_requests",
]
