"""A watch of an etcd prefix that continues after compactions and outages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

from dynamo.communication.directory import RecordChange
from dynamo.communication.discovery.change_queue import ChangeQueue
from dynamo.communication.discovery.etcd_client import EtcdClient, RevisionCompacted
from dynamo.communication.discovery.etcd_connection import EtcdConnection
from dynamo.communication.discovery.graceful_state import GracefulState
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import wait_for_first


class EtcdWatch:
    """Pushes the changes below `prefix` to `queue`. `root` is stripped from the keys.

    After a compaction or an outage the state is read again and the differences are pushed.
    """

    def __init__(self, connection: EtcdConnection, root: str, prefix: str) -> None:
        self._connection = connection
        self._root = root
        self._prefix = root + prefix
        self._started = False
        self.queue = ChangeQueue(prefix)
        self._state = GracefulState(self._push)

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
            self._state.close()

    async def _watch_once(self, client: EtcdClient) -> None:
        revision, state = await client.get_prefix(self._prefix)
        self._apply_state(state)
        async with aclosing(client.watch(self._prefix, revision + 1)) as batches:
            async for batch in batches:
                self._state.apply(batch)

    def _apply_state(self, state: Mapping[str, bytes]) -> None:
        """Push the first state, or the differences to a state that was read again."""
        if self._started:
            self._state.replace(state)
            return
        self._started = True
        self._state.records = dict(state)
        self.queue.start({self._strip_root(key): value for key, value in state.items()})

    def _push(self, changes: Sequence[RecordChange]) -> None:
        self.queue.push(
            RecordChange(self._strip_root(change.key), change.value) for change in changes
        )

    def _strip_root(self, key: str) -> str:
        return key[len(self._root) :]
