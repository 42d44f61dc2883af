"""Call one instance, stream back, cancel: the request plane. Backends: `memory:`, `tcp:`."""

from dynamo.communication.requests.plane import (
    CallInfo,
    Handler,
    Outgoing,
    Requests,
    Sink,
    Window,
    open_requests,
)

__all__ = ["CallInfo", "Handler", "Outgoing", "Requests", "Sink", "Window", "open_requests"]
