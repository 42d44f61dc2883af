"""What the client needs of a network. There are two: asyncio's, and blocking sockets.

All logic is written once, as coroutines over these. With blocking sockets they never suspend, so
`finish` runs one to its end where it stands: no event loop, no thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from dynamo_client.config import Origin

T = TypeVar("T")


class Channel(ABC):
    """One connection."""

    @abstractmethod
    async def send(self, data: bytes, timeout_s: float) -> None:
        """Raises `OSError`."""

    @abstractmethod
    async def receive(self, timeout_s: float) -> bytes:
        """What has come, at least a byte; b"" when the peer has ended. Raises `OSError`, of which
        `TimeoutError` is one."""

    @abstractmethod
    def is_reusable(self) -> bool:
        """Still open, nothing unasked has come, and it may be used from here."""

    @abstractmethod
    def close(self) -> None:
        """At once; what is in flight is lost. Safe to repeat."""


class NetworkBackend(ABC):
    """Opens channels, and waits."""

    @abstractmethod
    async def connect(self, origin: Origin, timeout_s: float) -> Channel:
        """Raises `OSError`."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait."""


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine over a network that blocks."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("a blocking network suspended")
