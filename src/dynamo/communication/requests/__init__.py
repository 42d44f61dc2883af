"""The request plane: calls to one instance with a streamed answer.

Backends: `memory:`, `tcp:`, `nats:`.
"""

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
