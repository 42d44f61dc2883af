"""The server: listens, sweeps for what is overdue, drains."""

from __future__ import annotations

import asyncio

from dynamo.communication.http.connection import (
    ErrorRenderer,
    HttpConnection,
    HttpHandler,
    HttpServerState,
)
from dynamo.communication.http.errors import plain_error
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.listener import open_listening_socket
from dynamo.core.clock import Clock
from dynamo.core.tasks import BackgroundTasks, wait_for_first

__all__ = ["ErrorRenderer", "HttpHandler", "HttpServer"]


class HttpServer:
    """`handler` runs as one task a request and is cancelled when the client goes away.

    `on_error` renders what never reached the handler (malformed, too large, too slow) and what the
    handler raised before it started its response: (error, request id or "") -> (status, JSON body).
    """

    def __init__(
        self,
        handler: HttpHandler,
        limits: HttpLimits,
        clock: Clock,
        *,
        on_error: ErrorRenderer = plain_error,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._clock = clock
        self._on_error = on_error
        self._state: HttpServerState | None = None
        self._server: asyncio.Server | None = None
        self._timeout_tasks = BackgroundTasks()

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._state.connections) if self._state else 0

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return len(self._state.tasks) if self._state else 0

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen; returns the bound port. Raises `PortInUse`.

        With `reuse_port` several processes share the port: whoever starts them calls `probe_port`
        once before, or two deployments would share it by mistake.
        """
        sock = await open_listening_socket(host, port, self._limits, reuse_port=reuse_port)
        shared = HttpServerState(self._handler, self._limits, self._clock, self._on_error)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: HttpConnection(shared), sock=sock)
        self._state = shared
        self._timeout_tasks.start(self._check_timeouts(shared), name="http sweep")
        return int(sock.getsockname()[1])

    async def stop(self, drain_s: float) -> None:
        """Accept nothing more, let what is in flight end for `drain_s` seconds, then cancel it."""
        shared, server = self._state, self._server
        if shared is None or server is None:
            return
        self._state = self._server = None
        server.close()
        for connection in list(shared.connections):
            connection.drain()
        if shared.tasks and drain_s > 0:
            await wait_for_first(shared.tasks.join(), self._clock.sleep(drain_s))
        await shared.tasks.close()
        await self._timeout_tasks.close()
        await asyncio.sleep(0)
        for connection in list(shared.connections):
            connection.close()

    async def _check_timeouts(self, shared: HttpServerState) -> None:
        period = self._limits.timeout_check_interval_s
        while True:
            await self._clock.sleep(period)
            now = self._clock.now()
            overdue = [
                one
                for one in shared.connections
                if one.deadline <= now or one.paused_at is not None
            ]
            for one in overdue:
                one.check_timeouts(now)
