"""The callers' end of one connection: the streams that are open, and who gets their payloads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from dynamo.communication.frames import Item
from dynamo.communication.requests.messages import MAX_STREAM
from dynamo.communication.requests.plane import Sink, Window
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, decode_error


class Remote(Protocol):
    """How the other end is told."""

    def open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        """Start a call."""

    def cancel(self, stream: int) -> None:
        """The caller left."""

    def credit(self, stream: int, size_bytes: int) -> None:
        """The consumer took so much."""


class Calls:
    """Calls over one connection; stream ids grow and are never used again. `frames`: how many were
    delivered."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._loop = asyncio.get_running_loop()
        self._last = 0
        self.frames = 0
        self._sinks: dict[int, Sink] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._failed: DynamoError | None = None

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def spent(self) -> bool:
        """No stream ids are left: later calls need another connection."""
        return self._last >= MAX_STREAM

    async def call(
        self, endpoint: str, payload: bytes, context: Context, sink: Sink, window: Window | None
    ) -> None:
        """One call, from opening to end. See `Requests.call`."""
        if self._failed is not None:
            raise InstanceGone(self._failed.message)
        self._last = stream = self._last + 1
        window_bytes = 0 if window is None else max(1, window.size_bytes)
        self._remote.open(stream, endpoint, context, window_bytes, payload)
        end = self._loop.create_future()
        self._sinks[stream] = sink
        self._ends[stream] = end
        if window is not None:
            window.on_release = _Release(self._remote, stream, window.size_bytes)
        try:
            await end
        finally:
            if window is not None:
                window.on_release = None
            if self._ends.pop(stream, None) is not None:
                del self._sinks[stream]
                self._remote.cancel(stream)

    def silent(self) -> list[int]:
        """The streams that have brought nothing since this was asked last."""
        found = []
        for stream, sink in self._sinks.items():
            if type(sink) is _Unheard:
                found.append(stream)
            else:
                self._sinks[stream] = _Unheard(self._sinks, stream, sink)
        return found

    def deliver(self, items: Iterable[Item]) -> None:
        """Feed what arrived to the sinks; what is late for a call that left is dropped."""
        self.frames += 1
        find = self._sinks.get
        for stream, flags, payload in items:
            sink = find(stream)
            if sink is None:
                continue
            if flags:
                self._over(stream, decode_error(payload) if payload else None)
                continue
            try:
                if sink(payload):
                    continue
            except Exception as error:  # noqa: BLE001 - a sink's bug ends its own call only
                self._leave(stream, error)
            else:
                self._leave(stream, None)

    def fail(self, error: DynamoError) -> None:
        """The connection is gone: every call raises a copy of `error`."""
        self._failed = error
        for stream in list(self._ends):
            self._over(stream, type(error)(error.message, hint=error.hint))

    def _leave(self, stream: int, error: Exception | None) -> None:
        self._over(stream, error)
        self._remote.cancel(stream)

    def _over(self, stream: int, error: Exception | None) -> None:
        del self._sinks[stream]
        end = self._ends.pop(stream)
        if end.done():
            return
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)


class _Unheard:
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


class _Release:
    """Tells the handler's end in steps of a quarter of the window, not item by item."""

    __slots__ = ("_held", "_remote", "_step", "_stream")

    def __init__(self, remote: Remote, stream: int, size_bytes: int) -> None:
        self._remote = remote
        self._stream = stream
        self._step = size_bytes // 4
        self._held = 0

    def __call__(self, size_bytes: int) -> Any:
        self._held += size_bytes
        if self._held > self._step:
            self._remote.credit(self._stream, self._held)
            self._held = 0
