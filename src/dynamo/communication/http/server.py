"""The server: listens, sweeps for what is overdue, drains."""

from __future__ import annotations

import asyncio

from dynamo.communication.http.connection import Connection, Handler, OnError, Shared
from dynamo.communication.http.errors import plain_error
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.listener import listening_socket
from dynamo.core.clock import Clock
from dynamo.core.tasks import Tasks, first_of

__all__ = ["Handler", "HttpServer", "OnError"]


class HttpServer:
    """`handler` runs as one task a request and is cancelled when the client goes away.

    `on_error` renders what never reached the handler (malformed, too large, too slow) and what the
    handler raised before it started its response: (error, request id or "") -> (status, JSON body).
    """

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        clock: Clock,
        *,
        on_error: OnError = plain_error,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._clock = clock
        self._on_error = on_error
        self._shared: Shared | None = None
        self._server: asyncio.Server | None = None
        self._sweeper = Tasks()

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._shared.connections) if self._shared else 0

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return len(self._shared.tasks) if self._shared else 0

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen; returns the bound port. Raises `PortInUse`.

        With `reuse_port` several processes share the port: whoever starts them calls `probe_port`
        once before, or two deployments would share it by mistake.
        """
        sock = await listening_socket(host, port, self._limits, reuse_port=reuse_port)
        shared = Shared(self._handler, self._limits, self._clock, self._on_error)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(shared), sock=sock)
        self._shared = shared
        self._sweeper.start(self._sweep(shared), name="http sweep")
        return int(sock.getsockname()[1])

    async def stop(self, drain_s: float) -> None:
        """Accept nothing more, let what is in flight end for `drain_s` seconds, then cancel it."""
        shared, server = self._shared, self._server
        if shared is None or server is None:
            return
        self._shared = self._server = None
        server.close()
        for connection in list(shared.connections):
            connection.drain()
        if shared.tasks and drain_s > 0:
            await first_of(shared.tasks.join(), self._clock.sleep(drain_s))
        await shared.tasks.close()
        await self._sweeper.close()
        await asyncio.sleep(0)
        for connection in list(shared.connections):
            connection.close()

    async def _sweep(self, shared: Shared) -> None:
        period = self._limits.sweep_s
        while True:
            await self._clock.sleep(period)
            now = self._clock.now()
            overdue = [
                one
                for one in shared.connections
                if one.deadline <= now or one.paused_at is not None
            ]
            for one in overdue:
                one.sweep(now)
