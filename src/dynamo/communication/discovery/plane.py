"""The interface of the discovery plane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from dynamo.communication.backends import load_backend
from dynamo.communication.directory import RecordChange, RecordWatch
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.plugins import DISCOVERY_BACKENDS

__all__ = ["Discovery", "RecordChange", "RecordWatch", "open_discovery"]


class Discovery(ABC):
    """Stores strongly consistent records that live as long as this process's lease.

    Keys are slash-separated text. `close` deletes every record that this object put. If the process
    dies, its records disappear within the lease's TTL (at once for memory: and file:).
    """

    def __init__(self) -> None:
        self._lease_lost_callbacks: list[Callable[[], None]] = []

    @property
    def connection_error(self) -> str:
        """The reason why the plane's server is unreachable now, or ""."""
        return ""

    @property
    def secret(self) -> str:
        """The secret that the processes of this plane prove to each other, or "" if it has none."""
        return ""

    @abstractmethod
    async def put(self, key: str, value: bytes) -> None:
        """Write or replace a record of this process. Raises `TooLarge`."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove a record of this process. A missing record is not an error."""

    @abstractmethod
    async def get(self, prefix: str) -> Mapping[str, bytes]:
        """Return all live records whose key starts with `prefix`."""

    @abstractmethod
    def watch(self, prefix: str) -> AbstractAsyncContextManager[RecordWatch]:
        """Watch a prefix: `async with watch(prefix) as changes: async for batch in changes`.

        The first batch is the current state and may be empty. Later batches are changes in order.
        Several changes of a key between two batches may be merged into the last one.
        """

    async def revoke_lease_of(self, key: str) -> None:  # noqa: B027 - nothing to do where leases end at once
        """Revoke the lease of the dead process that put `key`, which deletes all its records.

        Waits for the plane's server. Raises `PlaneUnavailable` if the server fails to do it.
        """

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` each time the lease is lost. The records must then be put again."""
        self._lease_lost_callbacks.append(callback)

    @abstractmethod
    async def close(self) -> None:
        """Delete this process's records and release its lease."""


async def open_discovery(url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Discovery:
    """Open a backend by URL. Raises `ConfigError` for an unknown scheme."""
    plane: Discovery = await load_backend(DISCOVERY_BACKENDS, url).open(url, options)
    return plane
