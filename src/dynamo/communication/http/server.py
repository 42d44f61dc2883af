"""The HTTP server: listens, checks timeouts and drains."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from math import inf

import msgspec

from dynamo.communication.http.body_budget import BodyBudget
from dynamo.communication.http.connection import HttpConnection
from dynamo.communication.http.descriptors import RESERVED_DESCRIPTORS, DescriptorBudget
from dynamo.communication.http.errors import STATUS_BY_CODE, PortInUse
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import HeaderCheck, Request
from dynamo.communication.http.response import Response
from dynamo.communication.http.server_state import ErrorHandler, HttpHandler, HttpServerState
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.tasks import BackgroundTasks, wait_for_first

LISTEN_BACKLOG = 1024
TCP_NOTSENT_LOWAT = 25  # from linux/tcp.h: not every build of the socket module has it


async def open_listening_socket(
    host: str, port: int, limits: HttpLimits, *, reuse_port: bool
) -> socket.socket:
    """Return a listening socket whose connections inherit small kernel buffers.

    The backlog of a slow reader then stays in this process, where it is measured. Raises
    `PortInUse`, `ConfigError`.
    """
    sock = await _bind(host, port, reuse_port=reuse_port)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, limits.notsent_lowat_bytes)
    return sock


async def _bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error}", param="server.http_host") from None
    family, kind, protocol, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        raise _bind_error(error, host, port) from None
    return sock


def _bind_error(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(host, port)
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror}",
        hint="ports below 1024 require privileges" if error.errno == errno.EACCES else "",
        param="server.http_port",
    )


__all__ = ["ErrorHandler", "HttpHandler", "HttpServer"]

JSON_HEADERS = (("content-type", "application/json"),)


def send_plain_error(error: DynamoError, request: Request, response: Response) -> None:
    """Answer with a JSON body. Applications pass their own function instead."""
    del request
    body = msgspec.json.encode({"error": {"message": error.message, "code": error.code}})
    response.send(STATUS_BY_CODE.get(error.code, 500), JSON_HEADERS, body)


class HttpServer:
    """Runs `handler` in one task per request and cancels it when the client disconnects.

    `on_error(error, request, response)` sends an error response. It answers requests that never
    reached the handler (malformed, too large, too slow) and errors that the handler raised before
    it started its response. `check_headers(request)` runs before a body is received. It raises the
    `DynamoError` to answer with, after which the connection closes. Clients leave the last
    `reserved_descriptors` of the process free.
    """

    def __init__(
        self,
        handler: HttpHandler,
        limits: HttpLimits,
        clock: Clock,
        *,
        on_error: ErrorHandler = send_plain_error,
        check_headers: HeaderCheck | None = None,
        reserved_descriptors: int = RESERVED_DESCRIPTORS,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._clock = clock
        self._on_error = on_error
        self._check_headers = check_headers
        self._reserved_descriptors = reserved_descriptors
        self.budget = BodyBudget(limits)
        self._state: HttpServerState | None = None
        self._server: asyncio.Server | None = None
        self._listener: socket.socket | None = None
        self._timeout_tasks = BackgroundTasks()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._state.connections) if self._state else 0

    @property
    def in_flight(self) -> int:
        """Number of requests that are being answered."""
        return len(self._state.tasks) if self._state else 0

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listen and return the bound port. Raises `PortInUse`.

        With `reuse_port` several processes share the port. Their parent must reserve it
        first, or two deployments could share it by mistake.
        """
        sock = await open_listening_socket(host, port, self._limits, reuse_port=reuse_port)
        state = HttpServerState(
            self._handler,
            self._limits,
            self._clock,
            self._on_error,
            self._check_headers,
            self.budget,
            descriptors=DescriptorBudget(self._reserved_descriptors),
        )
        loop = asyncio.get_running_loop()
        self._listener = sock
        self._server = await loop.create_server(
            lambda: HttpConnection(state), sock=sock, backlog=LISTEN_BACKLOG
        )
        self._state = state
        self._timeout_tasks.start(self._check_timeouts(state), name="http timeouts")
        return int(sock.getsockname()[1])

    async def leave(self, leave_s: float, drain_s: float) -> None:
        """Let clients go elsewhere: accept no more connections, and answer what comes on the open
        ones with `connection: close`. A connection without a request closes after `leave_s`.
        Returns when all have closed, or after `drain_s`."""
        state, server, listener = self._state, self._server, self._listener
        if state is None or server is None or listener is None or state.leave_s < inf:
            return
        state.leave_s = leave_s
        accepted = _accept_all(listener)
        server.close()
        loop = asyncio.get_running_loop()
        for sock in accepted:
            try:
                await loop.connect_accepted_socket(lambda: HttpConnection(state), sock)
            except OSError:  # the client has left
                sock.close()
        for connection in list(state.connections):
            connection.leave()
        if state.connections:
            await wait_for_first(state.left.wait(), self._clock.sleep(drain_s))

    async def stop(self, drain_s: float) -> None:
        """Accept no more requests, wait `drain_s` seconds for those in flight, then cancel them."""
        state, server = self._state, self._server
        if state is None or server is None:
            return
        self._state = self._server = self._listener = None
        server.close()
        for connection in list(state.connections):
            connection.drain()
        if state.tasks and drain_s > 0:
            await wait_for_first(state.tasks.join(), self._clock.sleep(drain_s))
        await state.tasks.close()
        await self._timeout_tasks.close()
        await asyncio.sleep(0)
        for connection in list(state.connections):
            connection.close()

    async def _check_timeouts(self, state: HttpServerState) -> None:
        period = self._limits.timeout_check_interval_s
        while True:
            await self._clock.sleep(period)
            now = self._clock.now()
            for connection in list(state.connections):
                if connection.deadline <= now or connection.paused_at is not None:
                    connection.check_timeouts(now)
                connection.check_silence(now)


def _accept_all(listener: socket.socket) -> list[socket.socket]:
    """Return the connections that wait. The kernel resets those that wait when a listener closes,
    though other processes listen on the port."""
    accepted = list[socket.socket]()
    with suppress(OSError):  # no further one, or no descriptor for it
        while True:
            accepted.append(listener.accept()[0])
            accepted[-1].setblocking(False)
    return accepted
