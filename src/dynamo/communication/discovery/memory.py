"""Discovery inside one process: `memory:` is one place for all, `memory:NAME` a place apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

from dynamo.communication.directory import Change, Watch
from dynamo.communication.discovery.feed import Feed
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.options import DEFAULT, PlaneOptions


class _Place:
    """The records and watchers of one name; a record knows whose it is."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[MemoryDiscovery, bytes]] = {}
        self.feeds: set[Feed] = set()
        self.members: set[MemoryDiscovery] = set()

    def state(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, (_, value) in self.records.items() if key.startswith(prefix)}

    def tell(self, changes: Sequence[Change]) -> None:
        for feed in self.feeds:
            feed.push(changes)


_places: dict[str, _Place] = {}


class MemoryDiscovery(Discovery):
    """Every object is a process of its own to the others."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._place = _places.setdefault(name, _Place())
        self._place.members.add(self)
        self._lost: list[Callable[[], None]] = []

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """Join the place that the URL names."""
        del options
        return cls(url.partition(":")[2])

    async def put(self, key: str, value: bytes) -> None:
        self._place.records[key] = (self, value)
        self._place.tell([Change(key, value)])

    async def delete(self, key: str) -> None:
        owner, _ = self._place.records.get(key, (None, b""))
        if owner is self:
            self._remove([key])

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        return self._place.state(prefix)

    def watch(self, prefix: str) -> AbstractAsyncContextManager[Watch]:
        return self._watch(prefix)

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        self._lost.append(callback)

    def expire(self) -> None:
        """What a server does that has not heard of this process for too long."""
        self._remove_own()

    def lose_lease(self) -> None:
        """What a server that forgot this process does, and tells it; for tests of what follows."""
        self._remove_own()
        for callback in self._lost:
            callback()

    async def close(self) -> None:
        self._remove_own()
        self._place.members.discard(self)
        if not self._place.members and not self._place.feeds:
            _places.pop(self._name, None)

    def _remove_own(self) -> None:
        self._remove([key for key, (owner, _) in self._place.records.items() if owner is self])

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self._place.records[key]
        if keys:
            self._place.tell([Change(key, None) for key in keys])

    @asynccontextmanager
    async def _watch(self, prefix: str) -> AsyncIterator[Watch]:
        feed = Feed(prefix)
        feed.start(self._place.state(prefix))
        self._place.feeds.add(feed)
        try:
            yield feed
        finally:
            self._place.feeds.discard(feed)
