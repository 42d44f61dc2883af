"""One watch kept over compactions and outages: the state is read anew, what differs is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Final

from dynamo.communication.directory import RecordChange
from dynamo.communication.discovery.change_queue import ChangeQueue
from dynamo.communication.discovery.etcd_client import EtcdClient, RevisionCompacted
from dynamo.communication.discovery.etcd_connection import EtcdConnection
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import wait_for_first

MISSING_GRACE_S: Final = 2.5
"""A server that lost its data comes back empty: a record that is missing after an outage is told
gone only when its owner has had this long to put it again."""


class EtcdWatch:
    """Feeds `feed` with what stands below `prefix`; `root` is cut off the keys."""

    def __init__(self, link: EtcdConnection, root: str, prefix: str) -> None:
        self._connection = link
        self._root = root
        self._prefix = root + prefix
        self._known: dict[str, bytes] = {}
        self._missing: set[str] = set()
        self._missing_timer: asyncio.TimerHandle | None = None
        self._started = False
        self.queue = ChangeQueue(prefix)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                server = await self._connection.wait_client()
                try:  # gRPC does not always wake who reads from a channel that is closed
                    await wait_for_first(self._watch_once(server), server.closed.wait())
                except RevisionCompacted:
                    continue
                except PlaneUnavailable as error:
                    self._connection.report_failure(server, error)
        finally:
            self._cancel_missing_timer()

    async def _watch_once(self, server: EtcdClient) -> None:
        revision, state = await server.get_prefix(self._prefix)
        self._apply_state(state)
        async with aclosing(server.watch(self._prefix, revision + 1)) as batches:
            async for batch in batches:
                self._forward(batch)

    def _apply_state(self, state: Mapping[str, bytes]) -> None:
        """The present state, at first or again."""
        if not self._started:
            self._started = True
            self._known = dict(state)
            self.queue.start({self._strip_root(key): value for key, value in state.items()})
            return
        self._cancel_missing_timer()
        changed = [RecordChange(key, value) for key, value in state.items()]
        self._forward([one for one in changed if self._known.get(one.key) != one.value])
        self._missing = self._known.keys() - state.keys()
        if self._missing:
            self._missing_timer = asyncio.get_running_loop().call_later(
                MISSING_GRACE_S, self._remove_missing
            )

    def _forward(self, batch: Sequence[RecordChange]) -> None:
        for key, value in ((one.key, one.value) for one in batch):
            self._missing.discard(key)
            if value is None:
                self._known.pop(key, None)
            else:
                self._known[key] = value
        self.queue.push(RecordChange(self._strip_root(one.key), one.value) for one in batch)

    def _remove_missing(self) -> None:
        """Those who did not come back in time are gone."""
        self._missing_timer = None
        self._forward([RecordChange(key, None) for key in sorted(self._missing)])

    def _cancel_missing_timer(self) -> None:
        if self._missing_timer is not None:
            self._missing_timer.cancel()
            self._missing_timer = None

    def _strip_root(self, key: str) -> str:
        return key[len(self._root) :]
