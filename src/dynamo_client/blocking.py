"""The network over blocking sockets. Its coroutines never suspend."""

from __future__ import annotations

import select
import socket
import time

from dynamo_client.config import Origin
from dynamo_client.network import Channel, NetworkBackend

READ_BYTES = 64 << 10


class BlockingNetworkBackend(NetworkBackend):
    """Opens blocking connections and sleeps in the calling thread."""

    async def connect(self, origin: Origin, timeout_s: float) -> Channel:
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
        time.sleep(seconds)  # noqa: ASYNC251 - this network blocks by design


class BlockingChannel(Channel):
    """A connected socket with or without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def send(self, data: bytes, timeout_s: float) -> None:
        self._sock.settimeout(timeout_s)
        self._sock.sendall(data)

    async def receive(self, timeout_s: float) -> bytes:
        self._sock.settimeout(timeout_s)
        return self._sock.recv(READ_BYTES)

    def is_reusable(self) -> bool:
        """Whether the socket is open and has nothing to read; a closed peer makes it readable."""
        if self._sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._sock.close()
