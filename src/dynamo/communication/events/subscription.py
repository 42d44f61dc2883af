"""One subscription over sockets: finds its sources in the directory, follows each."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, Final

import msgspec

from dynamo.communication.directory import Change, Directory
from dynamo.communication.events.plane import Listener
from dynamo.communication.events.records import ROOT, SourceKey, parse_key, parse_record
from dynamo.communication.events.subscriber import Following, Reach
from dynamo.communication.events.tracker import Tracker
from dynamo.core.errors import InstanceGone, ProtocolError
from dynamo.core.tasks import Tasks

log = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.1
_LAST_RETRY_S: Final = 2.0
_FAREWELL_S: Final = 1.0


class _Followed:
    """One source that the directory names."""

    __slots__ = ("address", "farewell", "key", "number", "tracker")

    def __init__(self, key: SourceKey, address: str, number: int, tracker: Tracker) -> None:
        self.key = key
        self.address = address
        self.number = number
        self.tracker = tracker
        self.farewell: asyncio.TimerHandle | None = None

    def stay(self) -> None:
        """It is in the directory."""
        if self.farewell is not None:
            self.farewell.cancel()
            self.farewell = None


class Subscription:
    """`start`, then the listener is called until `stop`."""

    def __init__(
        self,
        prefix: str,
        listener: Listener,
        directory: Directory,
        tasks: Tasks,
        reach: Reach,
    ) -> None:
        self._prefix = prefix
        self._listener = listener
        self._directory = directory
        self._tasks = tasks
        self._reach = reach
        self._running: set[asyncio.Task[Any]] = set()
        self._sources: dict[tuple[str, str], _Followed] = {}
        self._links: dict[str, Following] = {}
        self._dialling: set[str] = set()
        self._known = asyncio.Event()
        self._lost = 0

    async def start(self) -> None:
        """Returns when the sources of this moment are known."""
        self._run(self._keep_watching())
        await self._known.wait()

    def stop(self) -> None:
        """Call the listener no more."""
        for task in list(self._running):
            task.cancel()
        for link in self._links.values():
            link.link.abort()
        for source in list(self._sources.values()):
            self._drop(source)

    def lost(self) -> int:
        """Events that could not be repaired."""
        return self._lost + sum(one.tracker.lost for one in self._sources.values())

    def _run(self, work: Any) -> None:
        task = self._tasks.start(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _keep_watching(self) -> None:
        while True:
            try:
                await self._watch()
            except Exception:  # the directory is away: what is followed stays followed
                log.exception("event sources cannot be watched; trying again")
            await asyncio.sleep(_LAST_RETRY_S)

    async def _watch(self) -> None:
        async with self._directory.watch(ROOT + self._prefix) as changes:
            present: set[str] | None = None
            async for batch in changes:
                for change in batch:
                    self._change(change)
                if present is None:
                    present = {change.key for change in batch}
                    for source in list(self._sources.values()):
                        if str(source.key) not in present:
                            self._leave(source)
                    self._known.set()

    def _change(self, change: Change) -> None:
        try:
            key = parse_key(change.key)
            record = None if change.value is None else parse_record(change.value)
        except (ValueError, msgspec.DecodeError) as error:
            fields = {"key": change.key, "error": str(error)}
            log.warning("bad event source skipped", extra={"fields": fields})
            return
        if not key.subject.startswith(self._prefix):
            return
        known = self._sources.get((key.subject, key.publisher))
        if known is not None and known.key == key:
            known.stay()
            if record is None:
                self._leave(known)
        elif record is None:
            return
        elif known is None or known.key.epoch < key.epoch:
            self._follow(key, record.address, record.number, known)

    def _follow(self, key: SourceKey, address: str, number: int, former: _Followed | None) -> None:
        tracker = Tracker(
            key.subject,
            key.publisher,
            key.epoch,
            self._listener,
            partial(self._ask, address, number),
            None if former is None else former.tracker,
        )
        self._sources[key.subject, key.publisher] = _Followed(key, address, number, tracker)
        link = self._links.get(address)
        if link is not None:
            link.follow(key.subject, number, tracker)
        elif address not in self._dialling:
            self._dialling.add(address)
            self._run(self._keep_connected(address))
        if former is not None:
            former.stay()
            self._forget(former)

    def _ask(self, address: str, number: int, after: int) -> None:
        link = self._links.get(address)
        if link is not None:
            link.ask(number, after)

    def _leave(self, source: _Followed) -> None:
        """The directory names it no more. Its last events may still be on their way, so that it is
        gone when it says so, when its connection breaks, or after a second."""
        if source.address in self._links:
            loop = asyncio.get_running_loop()
            source.farewell = loop.call_later(_FAREWELL_S, self._gone, source)
        else:
            self._gone(source)

    def _gone(self, source: _Followed) -> None:
        self._drop(source)
        source.tracker.gone()

    def _drop(self, source: _Followed) -> None:
        source.stay()
        self._lost += source.tracker.lost
        del self._sources[source.key.subject, source.key.publisher]
        self._forget(source)

    def _forget(self, source: _Followed) -> None:
        link = self._links.get(source.address)
        if link is not None:
            link.forget(source.number)

    def _at(self, address: str) -> list[_Followed]:
        return [source for source in self._sources.values() if source.address == address]

    def _told_gone(self, address: str, number: int) -> None:
        for source in self._at(address):
            if source.number == number:
                self._gone(source)

    async def _keep_connected(self, address: str) -> None:
        """While the directory names a source at `address`."""
        retry_s = _FIRST_RETRY_S
        try:
            while self._at(address):
                try:
                    await self._stay_connected(address)
                    retry_s = _FIRST_RETRY_S
                except (OSError, TimeoutError, ProtocolError, InstanceGone) as error:
                    fields = {"address": address, "error": str(error)}
                    log.debug("event source cannot be reached", extra={"fields": fields})
                if self._at(address):
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, _LAST_RETRY_S)
        finally:
            self._dialling.discard(address)

    async def _stay_connected(self, address: str) -> None:
        wires = self._reach.wires
        link = Following(
            wires.incarnation_of(address), partial(self._told_gone, address), self._reach
        )
        await link.greeting.connect(partial(wires.dial, address=address))
        self._links[address] = link
        for source in self._at(address):
            link.follow(source.key.subject, source.number, source.tracker)
        if not link.trackers:
            link.link.close()
        try:
            await link.link.lost.wait()
        finally:
            del self._links[address]
            for source in self._at(address):
                if source.farewell is not None:
                    self._gone(source)
                else:
                    source.tracker.interrupted()
