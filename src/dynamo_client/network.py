"""The network of the client: an interface, and its implementation over blocking sockets.

The logic of the client is written once, as coroutines over this interface. Coroutines over blocking
sockets never suspend, so `run_blocking` completes them without an event loop or a thread. `aio.py`
has the implementation over asyncio.
"""

from __future__ import annotations

import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from dynamo_client.config import Origin

T = TypeVar("T")
READ_BYTES = 64 << 10


class Channel(ABC):
    """A connection to the server."""

    @abstractmethod
    async def send(self, data: bytes, timeout_s: float) -> None:
        """Send all of `data`. Raises `OSError`."""

    @abstractmethod
    async def receive(self, timeout_s: float) -> bytes:
        """Return the next bytes; b"" when the peer has closed. Raises `OSError`, including
        `TimeoutError`."""

    @abstractmethod
    def is_reusable(self) -> bool:
        """Whether the channel is open, has nothing to read, and may be used by the caller."""

    @abstractmethod
    def close(self) -> None:
        """Close at once and drop data in flight. Safe to repeat."""


class NetworkBackend(ABC):
    """Opens channels and sleeps."""

    @abstractmethod
    async def connect(self, origin: Origin, timeout_s: float) -> Channel:
        """Open a channel. Raises `OSError`."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""


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


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine over a blocking network."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine over a blocking network suspended")
