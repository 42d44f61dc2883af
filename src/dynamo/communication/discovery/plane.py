"""The promise of the discovery plane, and the table of its backends."""

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
    """Strongly consistent records that live as long as this process's lease.

    Keys are slash-separated text. Every record that this object put is deleted by `close`, and
    disappears by itself within the lease's TTL (at once for memory:, file:) when the process dies.
    """

    @property
    def connection_error(self) -> str:
        """Why the plane's server cannot be reached now; "" when all is well."""
        return ""

    @abstractmethod
    async def put(self, key: str, value: bytes) -> None:
        """Write or replace a record of this process."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove a record of this process; a missing one is no error."""

    @abstractmethod
    async def get(self, prefix: str) -> Mapping[str, bytes]:
        """All live records whose key starts with `prefix`."""

    @abstractmethod
    def watch(self, prefix: str) -> AbstractAsyncContextManager[RecordWatch]:
        """`async with watch(p) as changes: async for batch in changes`. The first batch is the
        present state (maybe empty); then batches of changes, in order, none lost. What is put and
        deleted between two looks may be merged."""

    async def revoke_lease_of(self, key: str) -> None:  # noqa: B027 - nothing to do where leases end at once
        """The process that put this record is dead: all that it put goes, before its lease ends.
        Waits for the plane's server. Raises `PlaneAway` where the server does not do it."""

    @abstractmethod
    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        """Called once each time the lease is lost; the records are gone and must be put again."""

    @abstractmethod
    async def close(self) -> None:
        """Delete this process's records and release the lease."""


async def open_discovery(url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Discovery:
    """Open a backend by URL. Raises `ConfigError` for an unknown scheme."""
    plane: Discovery = await load_backend(DISCOVERY_BACKENDS, url).open(url, options)
    return plane
