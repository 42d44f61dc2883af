"""The callers' end of one connection: the streams that are open, and who gets their payloads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from dynamo.communication.frames import Item
from dynamo.communication.requests.plane import FlowWindow, Sink
from dynamo.communication.requests.protocol import MAX_STREAM_ID
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, decode_error


class CallSender(Protocol):
    """How the other end is told."""

    def send_open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        """Start a call."""

    def send_cancel(self, stream: int) -> None:
        """The caller left."""

    def send_credit(self, stream: int, size_bytes: int) -> None:
        """The consumer took so much."""


class ClientStreams:
    """Calls over one connection; stream ids grow and are never used again. `frames`: how many were
    delivered."""

    def __init__(self, remote: CallSender) -> None:
        self._sender = remote
        self._loop = asyncio.get_running_loop()
        self._last_stream_id = 0
        self.frames_received = 0
        self._sinks: dict[int, Sink] = {}
        self._completions: dict[int, asyncio.Future[None]] = {}
        self._failure: DynamoError | None = None

    def __len__(self) -> int:
        return len(self._completions)

    @property
    def exhausted(self) -> bool:
        """No stream ids are left: later calls need another connection."""
        return self._last_stream_id >= MAX_STREAM_ID

    async def call(
        self, endpoint: str, payload: bytes, context: Context, sink: Sink, window: FlowWindow | None
    ) -> None:
        """One call, from opening to end. See `Requests.call`."""
        if self._failure is not None:
            raise InstanceGone(self._failure.message)
        self._last_stream_id = stream = self._last_stream_id + 1
        window_bytes = 0 if window is None else max(1, window.size_bytes)
        self._sender.send_open(stream, endpoint, context, window_bytes, payload)
        end = self._loop.create_future()
        self._sinks[stream] = sink
        self._completions[stream] = end
        if window is not None:
            window.on_release = _CreditSender(self._sender, stream, window.size_bytes)
        try:
            await end
        finally:
            if window is not None:
                window.on_release = None
            if self._completions.pop(stream, None) is not None:
                del self._sinks[stream]
                self._sender.send_cancel(stream)

    def find_silent_streams(self) -> list[int]:
        """The streams that have brought nothing since this was asked last."""
        found = []
        for stream, sink in self._sinks.items():
            if type(sink) is _SilentSink:
                found.append(stream)
            else:
                self._sinks[stream] = _SilentSink(self._sinks, stream, sink)
        return found

    def deliver(self, items: Iterable[Item]) -> None:
        """Feed what arrived to the sinks; what is late for a call that left is dropped."""
        self.frames_received += 1
        find = self._sinks.get
        for stream, flags, payload in items:
            sink = find(stream)
            if sink is None:
                continue
            if flags:
                self._finish(stream, decode_error(payload) if payload else None)
                continue
            try:
                if sink(payload):
                    continue
            except Exception as error:  # noqa: BLE001 - a sink's bug ends its own call only
                self._cancel(stream, error)
            else:
                self._cancel(stream, None)

    def fail(self, error: DynamoError) -> None:
        """The connection is gone: every call raises a copy of `error`."""
        self._failure = error
        for stream in list(self._completions):
            self._finish(stream, type(error)(error.message, hint=error.hint))

    def _cancel(self, stream: int, error: Exception | None) -> None:
        self._finish(stream, error)
        self._sender.send_cancel(stream)

    def _finish(self, stream: int, error: Exception | None) -> None:
        del self._sinks[stream]
        end = self._completions.pop(stream)
        if end.done():
            return
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)


class _SilentSink:
    """Stands in a stream's place until it is fed, so that to know who is silent costs an item
    nothing."""

    __slots__ = ("_sink", "_sinks", "_stream")

    def __init__(self, sinks: dict[int, Sink], stream: int, sink: Sink) -> None:
        self._sinks = sinks
        self._stream = stream
        self._sink = sink

    def __call__(self, payload: bytes) -> bool:
        self._sinks[self._stream] = self._sink
        return self._sink(payload)


class _CreditSender:
    """Tells the handler's end in steps of a quarter of the window, not item by item."""

    __slots__ = ("_released_bytes", "_sender", "_step_bytes", "_stream")

    def __init__(self, remote: CallSender, stream: int, size_bytes: int) -> None:
        self._sender = remote
        self._stream = stream
        self._step_bytes = size_bytes // 4
        self._released_bytes = 0

    def __call__(self, size_bytes: int) -> Any:
        self._released_bytes += size_bytes
        if self._released_bytes > self._step_bytes:
            self._sender.send_credit(self._stream, self._released_bytes)
            self._released_bytes = 0
