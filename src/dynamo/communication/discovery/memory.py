"""Discovery within one process: `memory:NAME`. Planes with the same name share one store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

from dynamo.communication.directory import RecordChange, RecordWatch
from dynamo.communication.discovery.change_queue import ChangeQueue
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions


class _DiscoveryStore:
    """The records, with their owners, and the watches of one name."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[MemoryDiscovery, bytes]] = {}
        self.queues: dict[ChangeQueue, None] = {}
        self.members: set[MemoryDiscovery] = set()

    def state(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, (_, value) in self.records.items() if key.startswith(prefix)}

    def publish(self, changes: Sequence[RecordChange]) -> None:
        for queue in self.queues:
            queue.push(changes)


_stores: dict[str, _DiscoveryStore] = {}


class MemoryDiscovery(Discovery):
    """A discovery plane in memory. Each object stands for one process."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._store = _stores.setdefault(name, _DiscoveryStore())
        self._store.members.add(self)

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Join the store that the URL names."""
        del options
        return cls(url.partition(":")[2])

    async def put(self, key: str, value: bytes) -> None:
        self._store.records[key] = (self, value)
        self._store.publish([RecordChange(key, value)])

    async def delete(self, key: str) -> None:
        owner, _ = self._store.records.get(key, (None, b""))
        if owner is self:
            self._remove([key])

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        return self._store.state(prefix)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        queue = ChangeQueue(prefix)
        queue.start(self._store.state(prefix))
        self._store.queues[queue] = None
        try:
            yield queue
        finally:
            del self._store.queues[queue]

    def expire_lease(self) -> None:
        """Delete this object's records, as a server does when a lease expires."""
        self._remove([key for key, (owner, _) in self._store.records.items() if owner is self])

    def lose_lease(self) -> None:
        """Delete this object's records and report the lost lease. For tests."""
        self.expire_lease()
        for callback in self._lease_lost_callbacks:
            callback()

    async def close(self) -> None:
        self.expire_lease()
        self._store.members.discard(self)
        if not self._store.members and not self._store.queues:
            _stores.pop(self._name, None)

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self._store.records[key]
        if keys:
            self._store.publish([RecordChange(key, None) for key in keys])
