"""The handlers' end: what waits to be sent on one connection, and one stream of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from dynamo.communication.frames import MAX_PAYLOAD_BYTES
from dynamo.communication.requests.plane import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, TooLarge, WorkerFailed, encode_error

log = logging.getLogger(__name__)


class SendQueue:
    """What all streams of one connection said in this turn of the loop: three parallel lists.

    `ends`: indices of the items that end their stream. `arm` is called with the first item.
    """

    __slots__ = ("ends", "open_streams", "payloads", "schedule_flush", "streams")

    def __init__(self, arm: Callable[[], None]) -> None:
        self.schedule_flush = arm
        self.streams: list[int] = []
        self.payloads: list[bytes] = []
        self.ends: list[int] = []
        self.open_streams: dict[int, ServerStream] = {}

    def end_stream(self, stream: int, payload: bytes) -> None:
        """The last item of a stream: nothing, or an encoded error."""
        self.ends.append(len(self.payloads))
        self.streams.append(stream)
        self.payloads.append(payload)
        self.schedule_flush()

    def clear(self) -> None:
        """Forget what waits."""
        self.streams.clear()
        self.payloads.clear()
        self.ends.clear()

    def cancel_all(self) -> None:
        """Nobody listens any more: cancel every handler of this connection."""
        self.clear()
        for stream in list(self.open_streams.values()):
            stream.cancel()


class ServerStream(ResponseWriter):
    """One call at the handler's end. `home` is the set of its endpoint's open streams."""

    __slots__ = (
        "_closed",
        "_send_queue",
        "_stream_id",
        "_unreleased_bytes",
        "_window_bytes",
        "_window_opened",
        "context",
        "endpoint_streams",
        "is_alive",
        "task",
    )

    def __init__(self, outbox: SendQueue, stream: int, context: Context, window_bytes: int) -> None:
        self.context = context
        self.is_alive = None
        self.endpoint_streams: set[ServerStream] = set()
        self.task: asyncio.Task[Any] | None = None
        self._send_queue = outbox
        self._stream_id = stream
        self._closed = False
        self._window_bytes = window_bytes
        self._unreleased_bytes = 0
        self._window_opened: asyncio.Event | None = None
        outbox.open_streams[stream] = self

    def send(self, payload: bytes) -> bool:
        if self._closed:
            return False
        size = len(payload)
        if size > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"an item of {size} bytes, limit {MAX_PAYLOAD_BYTES}")
        outbox = self._send_queue
        payloads = outbox.payloads
        if not payloads:
            outbox.schedule_flush()
        outbox.streams.append(self._stream_id)
        payloads.append(payload)
        if self._window_bytes:
            self._unreleased_bytes += size
        return True

    async def wait_for_window(self) -> None:
        if not self._window_bytes:
            return
        while self._unreleased_bytes >= self._window_bytes and not self._closed:
            if self._window_opened is None:
                self._window_opened = asyncio.Event()
            self._window_opened.clear()
            await self._window_opened.wait()

    def release(self, size_bytes: int) -> None:
        """The consumer took `size_bytes`."""
        self._unreleased_bytes -= size_bytes
        if self._window_opened is not None:
            self._window_opened.set()

    def on_silence_query(self) -> None:
        """The caller has long heard nothing: end what the handler says it forgot."""
        if self.is_alive is not None and not self.is_alive():
            log.warning("call forgotten", extra={"fields": {"request": self.context.request_id}})
            self.end(WorkerFailed("the instance has forgotten this call"))
            if self.task is not None:
                self.task.cancel()

    def end(self, error: DynamoError | None = None) -> None:
        """The handler is done, or is not waited for; only the first call counts."""
        if not self._closed:
            self._detach()
            self._send_queue.end_stream(
                self._stream_id, b"" if error is None else encode_error(error)
            )

    def cancel(self) -> None:
        """The caller is gone: cancel the handler."""
        if not self._closed:
            self._detach()
            if self.task is not None:
                self.task.cancel()

    def _detach(self) -> None:
        self._closed = True
        self._send_queue.open_streams.pop(self._stream_id, None)
        self.endpoint_streams.discard(self)
        if self._window_opened is not None:
            self._window_opened.set()
