"""The caller's end of a connection to one instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from dynamo.communication.frames import Item, pack_number, unpack_items
from dynamo.communication.handshake import ClientHandshake
from dynamo.communication.link import Link, TurnFlusher
from dynamo.communication.requests.plane import FlowWindow, Sink
from dynamo.communication.requests.protocol import (
    CANCEL,
    DATA,
    GOAWAY,
    MAX_STREAM_ID,
    PLANE,
    SILENCE_QUERY_BYTES,
    pack_credit,
    pack_open,
    pack_release,
    pack_share,
)
from dynamo.core.context import Context
from dynamo.core.errors import (
    DynamoError,
    InstanceGone,
    Overloaded,
    ProtocolError,
    WorkerFailed,
    decode_error,
)
from dynamo.core.shared_payload import SharedPayload

SILENCE_QUERY_S: Final = 2.0
"""The server is asked about streams that were silent for one to two of these periods."""
LARGE_PAYLOAD_BYTES: Final = 64 << 10
MAX_UNSENT_BYTES: Final = 64 << 20
"""Calls that would leave more than this unsent are refused. The connection stays open."""


class ClientStreams:
    """The open calls of one connection. Stream ids grow and are never reused."""

    def __init__(self, sender: ClientConnection) -> None:
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._last_stream_id = 0
        self.frames_received = 0
        self._sinks: dict[int, Sink] = {}
        self._completions: dict[int, asyncio.Future[None]] = {}
        self._share_users: dict[int, int] = {}
        self._failure: DynamoError | None = None

    def __len__(self) -> int:
        return len(self._completions)

    @property
    def exhausted(self) -> bool:
        """True if no stream ids are left, so that later calls need another connection."""
        return self._last_stream_id >= MAX_STREAM_ID

    async def call(
        self,
        endpoint: str,
        payload: bytes,
        context: Context,
        sink: Sink,
        window: FlowWindow | None,
        shared: SharedPayload | None = None,
    ) -> None:
        """Make one call and wait for its end. See `Requests.call`."""
        if self._failure is not None:
            raise InstanceGone(self._failure.message)
        number = 0
        if shared is not None:
            number = self._acquire_share(shared)
        self._last_stream_id = stream = self._last_stream_id + 1
        window_bytes = 0 if window is None else max(1, window.size_bytes)
        try:
            self._sender.send_open(stream, endpoint, context, window_bytes, payload, number)
            completion = self._loop.create_future()
            self._sinks[stream] = sink
            self._completions[stream] = completion
            if window is not None:
                window.on_release = _CreditSender(self._sender, stream, window.size_bytes)
            await completion
        finally:
            if window is not None:
                window.on_release = None
            if self._completions.pop(stream, None) is not None:
                del self._sinks[stream]
                self._sender.send_cancel(stream)
            if number:
                self._release_share(number)

    def _acquire_share(self, shared: SharedPayload) -> int:
        """Return the number that the call names."""
        number, users = shared.number, self._share_users
        if number not in users:
            self._sender.send_share(number, shared.payload)
        users[number] = users.get(number, 0) + 1
        return number

    def _release_share(self, number: int) -> None:
        self._share_users[number] -= 1
        if not self._share_users[number]:
            del self._share_users[number]
            self._sender.send_release(number)

    def find_silent_streams(self) -> list[int]:
        """Return the streams without an item since the last call of this method."""
        silent = []
        for stream, sink in self._sinks.items():
            if type(sink) is _SilentSink:
                silent.append(stream)
            else:
                self._sinks[stream] = _SilentSink(self._sinks, stream, sink)
        return silent

    def deliver(self, items: Iterable[Item]) -> None:
        """Pass received items to the sinks. Items of cancelled calls are dropped."""
        self.frames_received += 1
        find_sink = self._sinks.get
        for stream, flags, payload in items:
            sink = find_sink(stream)
            if sink is None:
                continue
            if flags:
                self._finish(stream, decode_error(payload) if payload else None)
                continue
            try:
                if sink(payload):
                    continue
            except Exception as error:  # noqa: BLE001 - an error of a sink ends its own call only
                self._cancel(stream, error)
            else:
                self._cancel(stream, None)

    def fail(self, error: DynamoError) -> None:
        """Fail every call with a copy of `error` because the connection is gone."""
        self._failure = error
        for stream in list(self._completions):
            self._finish(stream, type(error)(error.message, hint=error.hint))

    def _cancel(self, stream: int, error: Exception | None) -> None:
        self._finish(stream, error)
        self._sender.send_cancel(stream)

    def _finish(self, stream: int, error: Exception | None) -> None:
        del self._sinks[stream]
        completion = self._completions.pop(stream)
        if completion.done():
            return
        if error is None:
            completion.set_result(None)
        else:
            completion.set_exception(error)


class _SilentSink:
    """Replaces the sink of a silent stream and restores it with the next item.

    Silence is thus detected without work per item.
    """

    __slots__ = ("_sink", "_sinks", "_stream")

    def __init__(self, sinks: dict[int, Sink], stream: int, sink: Sink) -> None:
        self._sinks = sinks
        self._stream = stream
        self._sink = sink

    def __call__(self, payload: bytes) -> bool:
        self._sinks[self._stream] = self._sink
        return self._sink(payload)


class _CreditSender:
    """Sends credit to the handler's end in steps of a quarter of the window."""

    __slots__ = ("_released_bytes", "_sender", "_step_bytes", "_stream")

    def __init__(self, sender: ClientConnection, stream: int, size_bytes: int) -> None:
        self._sender = sender
        self._stream = stream
        self._step_bytes = size_bytes // 4
        self._released_bytes = 0

    def __call__(self, size_bytes: int) -> Any:
        self._released_bytes += size_bytes
        if self._released_bytes > self._step_bytes:
            self._sender.send_credit(self._stream, self._released_bytes)
            self._released_bytes = 0


class ClientConnection:
    """Carries the calls to one incarnation of a process. Retired, it closes with the last call."""

    def __init__(
        self,
        incarnation: str,
        flusher: TurnFlusher,
        *,
        on_retired: Callable[[ClientConnection], None],
        on_lost: Callable[[ClientConnection], None],
        secret: str = "",
    ) -> None:
        self.link = Link(self, flusher)
        self.streams = ClientStreams(self)
        self.handshake = ClientHandshake(self.link, PLANE, incarnation, secret)
        self._on_retired = on_retired
        self._on_lost = on_lost
        self._retired = False
        self._silence_timer: asyncio.TimerHandle | None = None

    def send_open(
        self,
        stream: int,
        endpoint: str,
        context: Context,
        window_bytes: int,
        payload: bytes,
        shared: int = 0,
    ) -> None:
        """Start a call. Raises `TooLarge`, and `Overloaded` if too many bytes are unsent."""
        frame = pack_open(stream, endpoint, context, window_bytes, payload, shared)
        size = len(payload)
        if size > LARGE_PAYLOAD_BYTES or (size and self.link.congested):
            self._check_unsent(size)
        self.link.write(frame)
        if size > LARGE_PAYLOAD_BYTES:
            self.link.flush()  # the next check counts these bytes
        if self._silence_timer is None:
            self._silence_timer = asyncio.get_running_loop().call_later(
                SILENCE_QUERY_S, self._query_silent_streams
            )

    def send_share(self, number: int, payload: bytes) -> None:
        """Send a payload for calls that name its number. Raises the errors of `send_open`."""
        frame = pack_share(number, payload)
        self._check_unsent(len(payload))
        self.link.write(frame)
        self.link.flush()

    def send_release(self, number: int) -> None:
        """Report that no further call names the shared payload."""
        self.link.write(pack_release(number))

    def send_cancel(self, stream: int) -> None:
        """Cancel a call because the caller left."""
        self.link.write(pack_number(CANCEL, stream))
        if self._retired:
            self._close_when_done()

    def send_credit(self, stream: int, size_bytes: int) -> None:
        """Report that the caller consumed `size_bytes`."""
        self.link.write(pack_credit(stream, size_bytes))

    def retire(self) -> None:
        """Open no more calls on this connection and close it when the last one ends."""
        self._retired = True
        self._on_retired(self)
        self._close_when_done()

    def on_connect(self) -> None:
        self.handshake.send_hello()

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        if not self.handshake.done:
            self.handshake.receive(kind, body)
        elif kind == DATA:
            self.streams.deliver(unpack_items(body, count))
            if self._retired:
                self._close_when_done()
        elif kind == GOAWAY:
            self.retire()
        else:
            raise ProtocolError(f"a frame of kind {kind} from a handler")

    def on_lost(self, error: Exception | None) -> None:
        self.handshake.on_lost()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self.streams.fail(
            WorkerFailed(f"the connection to the instance broke: {error or 'closed'}")
        )
        self._on_lost(self)

    def _check_unsent(self, size: int) -> None:
        """Raise `Overloaded` if `size` more bytes exceed the limit. Pings are empty and pass."""
        unsent = self.link.unsent_bytes
        if unsent + size > MAX_UNSENT_BYTES:
            raise Overloaded(
                f"{unsent:,} bytes wait for the connection to the worker; {size:,} more exceed "
                f"{MAX_UNSENT_BYTES:,}",
                retry_after_s=1.0,
            )

    def _query_silent_streams(self) -> None:
        """Ask the server whether silent streams are open, as queued and slow calls are.

        If the end of a call was lost, it is sent again. Silence alone never fails a call.
        """
        self._silence_timer = None
        for stream in self.streams.find_silent_streams():
            self.link.write(pack_credit(stream, SILENCE_QUERY_BYTES))
        if len(self.streams):
            self._silence_timer = asyncio.get_running_loop().call_later(
                SILENCE_QUERY_S, self._query_silent_streams
            )

    def _close_when_done(self) -> None:
        if not len(self.streams):
            self.streams.fail(InstanceGone("the connection to the instance is closed"))
            self.link.close()
