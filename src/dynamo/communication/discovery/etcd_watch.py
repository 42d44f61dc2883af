"""One watch kept over compactions and outages: the state is read anew, what differs is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Final

from dynamo.communication.directory import Change
from dynamo.communication.discovery.etcd_link import EtcdLink
from dynamo.communication.discovery.etcd_server import Compacted, EtcdServer
from dynamo.communication.discovery.feed import Feed
from dynamo.core.errors import PlaneAway
from dynamo.core.tasks import first_of

GRACE_S: Final = 2.5
"""A server that lost its data comes back empty: a record that is missing after an outage is told
gone only when its owner has had this long to put it again."""


class KeptWatch:
    """Feeds `feed` with what stands below `prefix`; `root` is cut off the keys."""

    def __init__(self, link: EtcdLink, root: str, prefix: str) -> None:
        self._link = link
        self._root = root
        self._prefix = root + prefix
        self._known: dict[str, bytes] = {}
        self._doubted: set[str] = set()
        self._verdict: asyncio.TimerHandle | None = None
        self._begun = False
        self.feed = Feed(prefix)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                server = await self._link.server()
                try:  # gRPC does not always wake who reads from a channel that is closed
                    await first_of(self._follow(server), server.closed.wait())
                except Compacted:
                    continue
                except PlaneAway as error:
                    self._link.failed(server, error)
        finally:
            self._forgive()

    async def _follow(self, server: EtcdServer) -> None:
        revision, state = await server.read(self._prefix)
        self._resume(state)
        async with aclosing(server.watch(self._prefix, revision + 1)) as batches:
            async for batch in batches:
                self._pass(batch)

    def _resume(self, state: Mapping[str, bytes]) -> None:
        """The present state, at first or again."""
        if not self._begun:
            self._begun = True
            self._known = dict(state)
            self.feed.start({self._cut(key): value for key, value in state.items()})
            return
        self._forgive()
        changed = [Change(key, value) for key, value in state.items()]
        self._pass([one for one in changed if self._known.get(one.key) != one.value])
        self._doubted = self._known.keys() - state.keys()
        if self._doubted:
            self._verdict = asyncio.get_running_loop().call_later(GRACE_S, self._give_up)

    def _pass(self, batch: Sequence[Change]) -> None:
        for key, value in ((one.key, one.value) for one in batch):
            self._doubted.discard(key)
            if value is None:
                self._known.pop(key, None)
            else:
                self._known[key] = value
        self.feed.push(Change(self._cut(one.key), one.value) for one in batch)

    def _give_up(self) -> None:
        """Those who did not come back in time are gone."""
        self._verdict = None
        self._pass([Change(key, None) for key in sorted(self._doubted)])

    def _forgive(self) -> None:
        if self._verdict is not None:
            self._verdict.cancel()
            self._verdict = None

    def _cut(self, key: str) -> str:
        return key[len(self._root) :]
