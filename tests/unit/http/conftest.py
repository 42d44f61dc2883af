"""The fixture `serve`: an HTTP server with the test's handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dynamo.communication.http import HttpHandler, HttpLimits, HttpServer
from dynamo.core.clock import SystemClock

Serve = Callable[..., Awaitable[tuple[HttpServer, int]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return a function: `server, port = await serve(handler, **limits)`."""
    running: list[HttpServer] = []

    async def start(handler: HttpHandler, **limits: Any) -> tuple[HttpServer, int]:
        server = HttpServer(handler, HttpLimits(**limits), SystemClock())
        port = await server.start("127.0.0.1", 0)
        running.append(server)
        return server, port

    yield start
    for server in running:
        await server.stop(0)
