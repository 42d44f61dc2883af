"""The publisher's buffer of events: numbers them and answers catch-up requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from dynamo.communication.events.plane import MAX_RING_BYTES, Dump, EventSource
from dynamo.communication.frames import MAX_PAYLOAD_BYTES
from dynamo.core.errors import TooLarge

MAX_RING_EVENTS: Final = 16_384
RING_DIVISOR_WITH_DUMP: Final = 4
"""The ring is smaller by this factor with a dump, which is usually smaller than a full ring."""

_last_epoch = 0


def new_epoch() -> int:
    """Return microseconds since 1970, greater than all earlier results in this process."""
    global _last_epoch
    _last_epoch = max(_last_epoch + 1, time.time_ns() // 1000)
    return _last_epoch


class CatchUp(msgspec.Struct, frozen=True):
    """Events from sequence `first` to `last`, or with `dump` the whole state at `last`."""

    last: int
    first: int
    payloads: Sequence[bytes]
    dump: bool = False


class BufferedEventSource(EventSource):
    """A source that sends all events of one loop iteration together and keeps a ring of them.

    `schedule_flush(flush)` must call `flush` in the next iteration of the loop. `send(first,
    payloads)` then gets the published events. Sequences start at 1. See `Events.open_source` for
    `latest` and `max_bytes`.
    """

    def __init__(
        self,
        dump: Dump | None,
        schedule_flush: Callable[[Callable[[], None]], None],
        send: Callable[[int, Sequence[bytes]], None],
        on_close: Callable[[], Awaitable[None]],
        *,
        latest: bool = False,
        max_bytes: int = MAX_RING_BYTES,
    ) -> None:
        self._dump = self._dump_latest if latest else dump
        self._latest_only = latest
        divisor = 1 if dump is None else RING_DIVISOR_WITH_DUMP
        self._max_events, self._max_bytes = MAX_RING_EVENTS // divisor, max_bytes // divisor
        self._schedule_flush = schedule_flush
        self._send = send
        self._on_close = on_close
        self._pending: list[bytes] = []
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self.last_sequence = 0

    def publish(self, payload: bytes) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"an event of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
        pending = self._pending
        if not pending:
            self._schedule_flush(self.flush)
        pending.append(payload)

    async def close(self) -> None:
        self.flush()
        await self._on_close()

    def flush(self) -> None:
        """Number and send pending events."""
        batch = self._pending
        if not batch:
            return
        self._pending = []
        first = self.last_sequence + 1
        self.last_sequence += len(batch)
        self._retain(batch)
        self._send(first, batch)

    def catch_up(self, after: int) -> CatchUp:
        """Return what a subscriber needs that has all events up to `after` (-1: none)."""
        self.flush()
        oldest = self.last_sequence - len(self._ring) + 1
        if after >= self.last_sequence:
            return CatchUp(self.last_sequence, self.last_sequence + 1, ())
        if (after < 0 or after + 1 < oldest) and self._dump is not None:
            return CatchUp(self.last_sequence, self.last_sequence, tuple(self._dump()), dump=True)
        if after < 0 and oldest > 1:
            return CatchUp(self.last_sequence, self.last_sequence + 1, ())
        first = max(after + 1, oldest, 1)
        return CatchUp(self.last_sequence, first, [*self._ring][first - oldest :])

    def _retain(self, batch: Sequence[bytes]) -> None:
        ring = self._ring
        if self._latest_only:
            ring.clear()
            ring.append(batch[-1])
            return
        ring.extend(batch)
        self._ring_bytes += sum(map(len, batch))
        while len(ring) > self._max_events or self._ring_bytes > self._max_bytes:
            self._ring_bytes -= len(ring.popleft())

    def _dump_latest(self) -> Sequence[bytes]:
        return tuple(self._ring)
