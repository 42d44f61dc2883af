"""The handlers' end: what waits to be sent on one connection, and one stream of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from dynamo.communication.frames import MAX_PAYLOAD_BYTES
from dynamo.communication.requests.plane import Outgoing
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, TooLarge, WorkerFailed, encode_error

log = logging.getLogger(__name__)


class Outbox:
    """What all streams of one connection said in this turn of the loop: three parallel lists.

    `ends`: indices of the items that end their stream. `arm` is called with the first item.
    """

    __slots__ = ("arm", "ends", "open", "payloads", "streams")

    def __init__(self, arm: Callable[[], None]) -> None:
        self.arm = arm
        self.streams: list[int] = []
        self.payloads: list[bytes] = []
        self.ends: list[int] = []
        self.open: dict[int, Stream] = {}

    def end(self, stream: int, payload: bytes) -> None:
        """The last item of a stream: nothing, or an encoded error."""
        self.ends.append(len(self.payloads))
        self.streams.append(stream)
        self.payloads.append(payload)
        self.arm()

    def clear(self) -> None:
        """Forget what waits."""
        self.streams.clear()
        self.payloads.clear()
        self.ends.clear()

    def leave_all(self) -> None:
        """Nobody listens any more: cancel every handler of this connection."""
        self.clear()
        for stream in list(self.open.values()):
            stream.leave()


class Stream(Outgoing):
    """One call at the handler's end. `home` is the set of its endpoint's open streams."""

    __slots__ = (
        "_id",
        "_outbox",
        "_over",
        "_owed_bytes",
        "_relief",
        "_window_bytes",
        "alive",
        "context",
        "home",
        "task",
    )

    def __init__(self, outbox: Outbox, stream: int, context: Context, window_bytes: int) -> None:
        self.context = context
        self.alive = None
        self.home: set[Stream] = set()
        self.task: asyncio.Task[Any] | None = None
        self._outbox = outbox
        self._id = stream
        self._over = False
        self._window_bytes = window_bytes
        self._owed_bytes = 0
        self._relief: asyncio.Event | None = None
        outbox.open[stream] = self

    def send(self, payload: bytes) -> bool:
        if self._over:
            return False
        size = len(payload)
        if size > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"an item of {size} bytes, limit {MAX_PAYLOAD_BYTES}")
        outbox = self._outbox
        payloads = outbox.payloads
        if not payloads:
            outbox.arm()
        outbox.streams.append(self._id)
        payloads.append(payload)
        if self._window_bytes:
            self._owed_bytes += size
        return True

    async def credit(self) -> None:
        if not self._window_bytes:
            return
        while self._owed_bytes >= self._window_bytes and not self._over:
            if self._relief is None:
                self._relief = asyncio.Event()
            self._relief.clear()
            await self._relief.wait()

    def release(self, size_bytes: int) -> None:
        """The consumer took `size_bytes`."""
        self._owed_bytes -= size_bytes
        if self._relief is not None:
            self._relief.set()

    def asked_after(self) -> None:
        """The caller has long heard nothing: end what the handler says it forgot."""
        if self.alive is not None and not self.alive():
            log.warning("call forgotten", extra={"fields": {"request": self.context.request_id}})
            self.end(WorkerFailed("the instance has forgotten this call"))
            if self.task is not None:
                self.task.cancel()

    def end(self, error: DynamoError | None = None) -> None:
        """The handler is done, or is not waited for; only the first call counts."""
        if not self._over:
            self._forget()
            self._outbox.end(self._id, b"" if error is None else encode_error(error))

    def leave(self) -> None:
        """The caller is gone: cancel the handler."""
        if not self._over:
            self._forget()
            if self.task is not None:
                self.task.cancel()

    def _forget(self) -> None:
        self._over = True
        self._outbox.open.pop(self._id, None)
        self.home.discard(self)
        if self._relief is not None:
            self._relief.set()
