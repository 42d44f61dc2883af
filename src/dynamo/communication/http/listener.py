"""Listening sockets of the HTTP server."""

from __future__ import annotations

import asyncio
import errno
import socket

from dynamo.communication.http.errors import PortInUse
from dynamo.communication.http.limits import HttpLimits
from dynamo.core.errors import ConfigError

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
