"""The interface of the client's two networks: asyncio and blocking sockets.

The logic of the client is written once, as coroutines over this interface. Coroutines over blocking
sockets never suspend, so `run_blocking` completes them without an event loop or a thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from dynamo_client.config import Origin

T = TypeVar("T")


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


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine over a blocking network."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine over a blocking network suspended")
