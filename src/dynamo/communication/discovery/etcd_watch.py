"""A watch of an etcd prefix that continues after compactions and outages."""

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
"""Time that owners have to put their records again after an outage.

A server that lost its data comes back empty. Records missing then are reported as removed only
after this time.
"""


class EtcdWatch:
    """Pushes the changes below `prefix` to `queue`. `root` is stripped from the keys.

    After a compaction or an outage the state is read again and the differences are pushed.
    """

    def __init__(self, connection: EtcdConnection, root: str, prefix: str) -> None:
        self._connection = connection
        self._root = root
        self._prefix = root + prefix
        self._known: dict[str, bytes] = {}
        self._missing: set[str] = set()
        self._missing_timer: asyncio.TimerHandle | None = None
        self._started = False
        self.queue = ChangeQueue(prefix)

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                client = await self._connection.wait_client()
                try:  # gRPC does not always wake the reader of a closed channel
                    await wait_for_first(self._watch_once(client), client.closed.wait())
                except RevisionCompacted:
                    continue
                except PlaneUnavailable as error:
                    self._connection.report_failure(client, error)
        finally:
            self._cancel_missing_timer()

    async def _watch_once(self, client: EtcdClient) -> None:
        revision, state = await client.get_prefix(self._prefix)
        self._apply_state(state)
        async with aclosing(client.watch(self._prefix, revision + 1)) as batches:
            async for batch in batches:
                self._forward(batch)

    def _apply_state(self, state: Mapping[str, bytes]) -> None:
        """Push the first state, or the differences to a state that was read again."""
        if not self._started:
            self._started = True
            self._known = dict(state)
            self.queue.start({self._strip_root(key): value for key, value in state.items()})
            return
        self._cancel_missing_timer()
        changed = [RecordChange(key, value) for key, value in state.items()]
        self._forward([change for change in changed if self._known.get(change.key) != change.value])
        self._missing = self._known.keys() - state.keys()
        if self._missing:
            self._missing_timer = asyncio.get_running_loop().call_later(
                MISSING_GRACE_S, self._remove_missing
            )

    def _forward(self, batch: Sequence[RecordChange]) -> None:
        for key, value in ((change.key, change.value) for change in batch):
            self._missing.discard(key)
            if value is None:
                self._known.pop(key, None)
            else:
                self._known[key] = value
        self.queue.push(
            RecordChange(self._strip_root(change.key), change.value) for change in batch
        )

    def _remove_missing(self) -> None:
        """Report the records as removed that were not put again in time."""
        self._missing_timer = None
        self._forward([RecordChange(key, None) for key in sorted(self._missing)])

    def _cancel_missing_timer(self) -> None:
        if self._missing_timer is not None:
            self._missing_timer.cancel()
            self._missing_timer = None

    def _strip_root(self, key: str) -> str:
        return key[len(self._root) :]
