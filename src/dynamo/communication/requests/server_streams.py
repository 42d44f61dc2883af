"""Streams at the handler's end of a connection, and their common send queue."""

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
    """Items that all streams of one connection sent in this loop iteration.

    `streams` and `payloads` are parallel lists. `ends` holds the indices of items that end their
    stream. `schedule_flush` is called with the first item. `open_streams` holds streams by id.
    """

    __slots__ = ("ends", "open_streams", "payloads", "schedule_flush", "streams")

    def __init__(self, schedule_flush: Callable[[], None]) -> None:
        self.schedule_flush = schedule_flush
        self.streams: list[int] = []
        self.payloads: list[bytes | memoryview] = []
        self.ends: list[int] = []
        self.open_streams: dict[int, ServerStream] = {}

    def end_stream(self, stream: int, payload: bytes) -> None:
        """Queue the last item of a stream: b"", or an encoded error."""
        self.ends.append(len(self.payloads))
        self.streams.append(stream)
        self.payloads.append(payload)
        self.schedule_flush()

    def clear(self) -> None:
        """Drop all queued items."""
        self.streams.clear()
        self.payloads.clear()
        self.ends.clear()

    def cancel_all(self) -> None:
        """Drop all queued items and cancel every handler, because the caller is gone."""
        self.clear()
        for stream in list(self.open_streams.values()):
            stream.cancel()


class ServerStream(ResponseWriter):
    """A call at the handler's end. `endpoint_streams` holds the open streams of its endpoint."""

    def __init__(self, queue: SendQueue, stream: int, context: Context, window_bytes: int) -> None:
        self.context = context
        self.is_alive = None
        self.shared = None
        self.endpoint_streams: dict[ServerStream, None] = {}
        self.task: asyncio.Task[Any] | None = None
        self._send_queue = queue
        self._stream_id = stream
        self._closed = False
        self._window_bytes = window_bytes
        self._unreleased_bytes = 0
        self._window_opened: asyncio.Event | None = None
        queue.open_streams[stream] = self

    def send(self, payload: bytes | memoryview) -> bool:
        if self._closed:
            return False
        size = len(payload)
        if size > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"an item of {size} bytes, limit {MAX_PAYLOAD_BYTES}")
        queue = self._send_queue
        payloads = queue.payloads
        if not payloads:
            queue.schedule_flush()
        queue.streams.append(self._stream_id)
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
        """Open the window by `size_bytes` that the caller consumed."""
        self._unreleased_bytes -= size_bytes
        if self._window_opened is not None:
            self._window_opened.set()

    def on_silence_query(self) -> None:
        """Fail the call if its handler does not work on it any more."""
        if self.is_alive is not None and not self.is_alive():
            error = WorkerFailed("call failed: the engine no longer has the request")
            log.warning(error.message, extra={"fields": {"request": self.context.request_id}})
            self.end(error)
            if self.task is not None:
                self.task.cancel()

    def end(self, error: DynamoError | None = None) -> None:
        """End the stream. Only the first call has an effect."""
        if not self._closed:
            self._detach()
            self._send_queue.end_stream(
                self._stream_id, b"" if error is None else encode_error(error)
            )

    def cancel(self) -> None:
        """Cancel the handler because the caller is gone."""
        if not self._closed:
            self._detach()
            if self.task is not None:
                self.task.cancel()

    def _detach(self) -> None:
        self._closed = True
        self._send_queue.open_streams.pop(self._stream_id, None)
        self.endpoint_streams.pop(self, None)
        if self._window_opened is not None:
            self._window_opened.set()
