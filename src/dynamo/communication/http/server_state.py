"""State that all connections of one HTTP server share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from dynamo.communication.http.body_budget import BodyBudget
from dynamo.communication.http.descriptors import DescriptorBudget, EvictableConnection
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import HeaderCheck, Request
from dynamo.communication.http.response import ConnectionFlusher, Response
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import BackgroundTasks

HttpHandler = Callable[[Request, Response], Awaitable[None]]
ErrorHandler = Callable[[DynamoError, Request, Response], None]


class ServedConnection(EvictableConnection, Protocol):
    """A connection whose deadline the server checks, and which it asks to leave."""

    deadline: float
    paused_at: float | None

    def check_timeouts(self, now: float) -> None:
        """Handle a passed deadline, a full backlog and a stalled client."""

    def check_silence(self, now: float) -> None:
        """Let a stream break its silence."""

    def leave(self) -> None:
        """Close after the next answer that can say so, or without a request for `leave_s`."""

    def drain(self) -> None:
        """Accept no further request and close after the current answer."""


@dataclass(eq=False)
class HttpServerState:
    """State that all connections of one server share."""

    handler: HttpHandler
    limits: HttpLimits
    clock: Clock
    on_error: ErrorHandler
    check_headers: HeaderCheck | None = None
    budget: BodyBudget = field(default_factory=BodyBudget)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    connections: set[ServedConnection] = field(default_factory=set)
    flusher: ConnectionFlusher = field(default_factory=ConnectionFlusher)
    descriptors: DescriptorBudget = field(default_factory=DescriptorBudget)
    leave_s: float = inf
    """Finite once the server leaves: then answers close their connections, and so do so many
    seconds without a request."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last connection of a server that leaves has closed."""
