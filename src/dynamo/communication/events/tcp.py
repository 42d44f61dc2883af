"""Events in own frames: every publishing process is its own server; the directory says where.
Over TCP unless told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from dynamo.communication.directory import Directory
from dynamo.communication.events.broadcast import Broadcast
from dynamo.communication.events.messages import EVENTS, pack_events, pack_gone
from dynamo.communication.events.outlet import Outlet, new_epoch
from dynamo.communication.events.plane import Dump, Events, Listener, Source
from dynamo.communication.events.publisher import Follower
from dynamo.communication.events.records import SourceKey, SourceRecord, encode_record
from dynamo.communication.events.subscriber import Reach
from dynamo.communication.events.subscription import Subscription
from dynamo.communication.link import Flusher, Link, close_links
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.wires import TcpWires, Wires
from dynamo.core.tasks import Tasks


class TcpEvents(Events):
    """`tcp://HOST:PORT`; port 0 is any. Listens from the first source on. With a `broadcast`, new
    events go out once, by it, and not to each follower.

    `lossy(first sequence)` True: a batch is dropped on its way in (for tests of repair; set it
    before subscribing).
    """

    def __init__(
        self, wires: Wires, directory: Directory, broadcast: Broadcast | None = None
    ) -> None:
        self._wires = wires
        self._directory = directory
        self._broadcast = broadcast
        self._flusher = Flusher()
        self._tasks = Tasks()
        self._opening = asyncio.Lock()
        self._outlets: dict[int, Outlet] = {}
        self._last_number = 0
        self._followers: set[Follower] = set()
        self._subscriptions: set[Subscription] = set()
        self._lost = 0
        self.lossy: Callable[[int], bool] | None = None

    @classmethod
    async def open(cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT) -> Self:
        """Nothing listens before the first source. Raises `ConfigError`."""
        return cls(await TcpWires.open(url, options), directory)

    async def source(
        self, subject: str, publisher: str, dump: Dump | None = None, *, latest: bool = False
    ) -> Source:
        async with self._opening:
            if not self._wires.listening:
                await self._wires.listen(self._accept)
        self._last_number = number = self._last_number + 1
        key = str(SourceKey(subject, publisher, new_epoch()))
        outlet = Outlet(
            dump,
            self._flusher.arm,
            partial(self._spread, subject, number),
            partial(self._part, subject, number, key),
            latest=latest,
        )
        self._outlets[number] = outlet
        record = SourceRecord(self._wires.address, number)
        await self._directory.put(key, encode_record(record))
        return outlet

    async def subscribe(self, prefix: str, listener: Listener) -> Callable[[], None]:
        subscription = Subscription(
            prefix,
            listener,
            self._directory,
            self._tasks,
            Reach(self._wires, self._flusher, self._broadcast, self.lossy),
        )
        self._subscriptions.add(subscription)
        await subscription.start()
        return partial(self._unsubscribe, subscription)

    def lost(self) -> int:
        return self._lost + sum(one.lost() for one in self._subscriptions)

    async def close(self) -> None:
        for subscription in list(self._subscriptions):
            self._unsubscribe(subscription)
        for outlet in list(self._outlets.values()):
            await outlet.close()
        await self._tasks.close()
        self._wires.stop()
        await close_links([follower.link for follower in self._followers])

    def abort(self) -> None:
        """Break every connection at once, as a crash would."""
        self._wires.stop()
        for follower in list(self._followers):
            follower.link.abort()

    def _accept(self) -> Link:
        wires = self._wires
        follower = Follower(
            self._outlets, self._flusher, wires.incarnation, self._followers.discard, wires.secret
        )
        self._followers.add(follower)
        return follower.link

    def _spread(self, subject: str, number: int, first: int, payloads: Sequence[bytes]) -> None:
        if self._broadcast is not None:
            last = first + len(payloads) - 1
            self._broadcast.send(
                subject, number, pack_events(EVENTS, number, first, payloads), last
            )
        elif self._followers:
            frames = pack_events(EVENTS, number, first, payloads)
            for follower in self._followers:
                follower.send(number, frames)

    async def _part(self, subject: str, number: int, key: str) -> None:
        if self._outlets.pop(number, None) is not None:
            if self._broadcast is not None:
                self._broadcast.end(subject, number, pack_gone(number))
            else:
                for follower in self._followers:
                    follower.part(number)
            await self._directory.delete(key)

    def _unsubscribe(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.discard(subscription)
            subscription.stop()
            self._lost += subscription.lost()
