"""A subscription over connections: finds its sources in the directory and follows each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dynamo.communication.directory import Directory, RecordChange, follow_records
from dynamo.communication.events.plane import EventListener
from dynamo.communication.events.records import KEY_ROOT, SourceKey, parse_key, parse_record
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.subscriber_connection import (
    SubscriberConnection,
    SubscriptionContext,
)
from dynamo.core.clock import Backoff, SystemClock
from dynamo.core.errors import DECODE_ERRORS, InstanceGone, ProtocolError
from dynamo.core.tasks import BackgroundTasks

log = logging.getLogger(__name__)

_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 2.0
_REMOVAL_DELAY_S: Final = 1.0


@dataclass(eq=False)
class _FollowedSource:
    """A source that the directory lists."""

    key: SourceKey
    address: str
    number: int
    tracker: SequenceTracker
    removal_timer: asyncio.TimerHandle | None = None

    def cancel_removal(self) -> None:
        """Keep the source because the directory lists it again."""
        if self.removal_timer is not None:
            self.removal_timer.cancel()
            self.removal_timer = None


class Subscription:
    """Calls the listener with the events of all sources below `prefix`, from `start` to `stop`.

    Sources of one process share a connection. A source with a newer epoch replaces its predecessor.
    """

    def __init__(
        self,
        prefix: str,
        listener: EventListener,
        directory: Directory,
        tasks: BackgroundTasks,
        context: SubscriptionContext,
    ) -> None:
        self._prefix = prefix
        self._listener = listener
        self._directory = directory
        self._tasks = tasks
        self._context = context
        self._running: dict[asyncio.Task[Any], None] = {}
        self._sources: dict[tuple[str, str], _FollowedSource] = {}
        self._connections: dict[str, SubscriberConnection] = {}
        self._connecting: set[str] = set()
        self._sources_known = asyncio.Event()
        self._lost_events = 0

    async def start(self) -> None:
        """Start watching. Returns once the current sources are known."""
        prefix = KEY_ROOT + self._prefix
        self._start_task(follow_records(self._directory, prefix, self._apply, SystemClock()))
        await self._sources_known.wait()

    def stop(self) -> None:
        """Stop calling the listener and close all connections."""
        for task in list(self._running):
            task.cancel()
        for connection in self._connections.values():
            connection.link.abort()
        for source in list(self._sources.values()):
            self._drop_source(source)

    def count_lost_events(self) -> int:
        """Return how many events could not be repaired."""
        return self._lost_events + sum(
            source.tracker.lost_events for source in self._sources.values()
        )

    def _start_task(self, work: Any) -> None:
        task = self._tasks.start(work)
        self._running[task] = None
        task.add_done_callback(lambda ended: self._running.pop(ended, None))

    def _apply(self, batch: Sequence[RecordChange], replaces: bool) -> None:
        for change in batch:
            self._apply_change(change)
        if replaces:
            present = {change.key for change in batch}
            for source in list(self._sources.values()):
                if str(source.key) not in present:
                    self._schedule_removal(source)
            self._sources_known.set()

    def _apply_change(self, change: RecordChange) -> None:
        try:
            key = parse_key(change.key)
            record = None if change.value is None else parse_record(change.value)
        except (ValueError, *DECODE_ERRORS) as error:
            fields = {"key": change.key, "error": str(error)}
            log.warning("bad event source skipped", extra={"fields": fields})
            return
        if not key.subject.startswith(self._prefix):
            return
        current = self._sources.get((key.subject, key.publisher))
        if current is not None and current.key == key:
            current.cancel_removal()
            if record is None:
                self._schedule_removal(current)
        elif record is None:
            return
        elif current is None or current.key.epoch < key.epoch:
            self._follow(key, record.address, record.number, current)

    def _follow(
        self, key: SourceKey, address: str, number: int, former: _FollowedSource | None
    ) -> None:
        tracker = SequenceTracker(
            key.subject,
            key.publisher,
            key.epoch,
            self._listener,
            partial(self._request_catch_up, address, number),
            None if former is None else former.tracker,
        )
        self._sources[key.subject, key.publisher] = _FollowedSource(key, address, number, tracker)
        connection = self._connections.get(address)
        if connection is not None:
            connection.follow(key.subject, number, tracker)
        elif address not in self._connecting:
            self._connecting.add(address)
            self._start_task(self._keep_connected(address))
        if former is not None:
            former.cancel_removal()
            self._unfollow(former)

    def _request_catch_up(self, address: str, number: int, after: int) -> None:
        connection = self._connections.get(address)
        if connection is not None:
            connection.request_catch_up(number, after)

    def _schedule_removal(self, source: _FollowedSource) -> None:
        """Remove a source that the directory does not list any more.

        Its last events may still be under way. The removal therefore waits for its GONE frame, the
        end of its connection, or `_REMOVAL_DELAY_S`.
        """
        if source.address in self._connections:
            loop = asyncio.get_running_loop()
            source.removal_timer = loop.call_later(_REMOVAL_DELAY_S, self._remove_source, source)
        else:
            self._remove_source(source)

    def _remove_source(self, source: _FollowedSource) -> None:
        self._drop_source(source)
        source.tracker.on_source_gone()

    def _drop_source(self, source: _FollowedSource) -> None:
        source.cancel_removal()
        self._lost_events += source.tracker.lost_events
        del self._sources[source.key.subject, source.key.publisher]
        self._unfollow(source)

    def _unfollow(self, source: _FollowedSource) -> None:
        connection = self._connections.get(source.address)
        if connection is not None:
            connection.unfollow(source.number)

    def _sources_at(self, address: str) -> list[_FollowedSource]:
        return [source for source in self._sources.values() if source.address == address]

    def _on_source_closed(self, address: str, number: int) -> None:
        for source in self._sources_at(address):
            if source.number == number:
                self._remove_source(source)

    async def _keep_connected(self, address: str) -> None:
        """Reconnect while the directory lists a source at `address`."""
        backoff = Backoff(_MIN_RETRY_S, _MAX_RETRY_S)
        try:
            while self._sources_at(address):
                try:
                    await self._run_connection(address)
                    backoff.reset()
                except (OSError, TimeoutError, ProtocolError, InstanceGone) as error:
                    fields = {"address": address, "error": str(error)}
                    log.debug("event source cannot be reached", extra={"fields": fields})
                if self._sources_at(address):
                    await asyncio.sleep(backoff.next_s())
        finally:
            self._connecting.discard(address)

    async def _run_connection(self, address: str) -> None:
        transport = self._context.transport
        connection = SubscriberConnection(
            transport.incarnation_of(address),
            partial(self._on_source_closed, address),
            self._context,
        )
        await connection.handshake.connect(partial(transport.dial, address=address))
        self._connections[address] = connection
        for source in self._sources_at(address):
            connection.follow(source.key.subject, source.number, source.tracker)
        if not connection.trackers:
            connection.link.close()
        try:
            await connection.link.closed.wait()
        finally:
            del self._connections[address]
            for source in self._sources_at(address):
                if source.removal_timer is not None:
                    self._remove_source(source)
                else:
                    source.tracker.on_disconnected()
