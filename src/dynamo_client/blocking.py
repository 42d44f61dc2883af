"""The network by blocking sockets. Its coroutines never suspend."""

from __future__ import annotations

import select
import socket
import time

from dynamo_client.config import Origin
from dynamo_client.network import Channel, NetworkBackend

READ_BYTES = 64 << 10


class BlockingNetworkBackend(NetworkBackend):
    """Connections of the calling thread."""

    async def connect(self, origin: Origin, timeout_s: float) -> Channel:
        """Raises `OSError`."""
        sock = socket.create_connection((origin.host, origin.port), timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.secure:
                import ssl

                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=origin.host)
        except BaseException:
            sock.close()
            raise
        return BlockingChannel(sock)

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)  # noqa: ASYNC251 - blocking is what this network does


class BlockingChannel(Channel):
    """A socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def send(self, data: bytes, timeout_s: float) -> None:
        """All of it."""
        self._sock.settimeout(timeout_s)
        self._sock.sendall(data)

    async def receive(self, timeout_s: float) -> bytes:
        """What has come."""
        self._sock.settimeout(timeout_s)
        return self._sock.recv(READ_BYTES)

    def is_reusable(self) -> bool:
        """Open and silent: an end would be readable."""
        if self._sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close."""
        self._sock.close()
