"""The request plane inside one process: the same calls and streams, no bytes between them.

What a handler sends reaches the caller in the next turn of the loop, as over a wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Self

from dynamo.communication.addresses import new_incarnation
from dynamo.communication.frames import END_STREAM, MAX_PAYLOAD_BYTES
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.requests.client_streams import ClientStreams
from dynamo.communication.requests.endpoints import Endpoints
from dynamo.communication.requests.plane import FlowWindow, RequestHandler, Requests, Sink
from dynamo.communication.requests.server_streams import SendQueue, ServerStream
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, TooLarge, WorkerFailed

_planes: dict[str, MemoryRequests] = {}


class MemoryRequests(Requests):
    """`memory:`; every object is a process of its own to the others."""

    def __init__(self) -> None:
        self._address = f"memory://{new_incarnation()}"
        self.endpoints = Endpoints()
        self._connections: dict[str, _MemoryConnection] = {}
        self.incoming: set[_MemoryConnection] = set()
        self._broken_callbacks: list[Callable[[str], None]] = []
        self.severed = False
        self.stalled: set[_MemoryConnection] = set()

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """All of `memory:` is one network."""
        del url, options
        plane = cls()
        _planes[plane.address] = plane
        return plane

    @property
    def address(self) -> str:
        return self._address

    async def serve(self, endpoint: str, handler: RequestHandler) -> None:
        self.endpoints.serve(endpoint, handler)

    async def withdraw(self, endpoint: str, drain_s: float | None = 0.0) -> None:
        await self.endpoints.withdraw(endpoint, drain_s)

    async def call(
        self,
        address: str,
        endpoint: str,
        payload: bytes,
        context: Context,
        sink: Sink,
        *,
        window: FlowWindow | None = None,
    ) -> None:
        wire = self._connections.get(address) or self._connect(address)
        await wire.streams.call(endpoint, payload, context, sink, window)

    def count_received_frames(self, address: str) -> int:
        wire = self._connections.get(address)
        return 0 if wire is None else wire.streams.frames_received

    def disconnect(self, address: str) -> None:
        wire = self._connections.get(address)
        if wire is not None:
            wire.close_client()

    def on_connection_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self._broken_callbacks.append(callback)
        return lambda: self._broken_callbacks.remove(callback)

    async def close(self) -> None:
        _planes.pop(self._address, None)
        await self.endpoints.close()
        await asyncio.sleep(0)  # what the handlers' ends queued is delivered
        self.abort()

    def abort(self) -> None:
        """Break every connection at once, as a crash would."""
        _planes.pop(self._address, None)
        for wire in list(self._connections.values()):
            wire.close_client()
        for wire in list(self.incoming):
            wire.close_server()

    def sever(self) -> None:
        """The network reaches this process no more: whatever is said to it or by it waits."""
        self.severed = True

    def rejoin(self) -> None:
        """The network reaches it again: what waited arrives, in order."""
        self.severed = False
        for wire in list(self.stalled):
            wire.deliver_held()

    def _connect(self, address: str) -> _MemoryConnection:
        there = _planes.get(address)
        if there is None or self._address not in _planes:
            self._notify_broken(address)
            raise InstanceGone(f"nobody is at {address}")
        wire = self._connections[address] = _MemoryConnection(self, there)
        there.incoming.add(wire)
        return wire

    def remove_connection(self, wire: _MemoryConnection, address: str) -> None:
        """The wire from here to `address` is gone."""
        if self._connections.get(address) is wire:
            del self._connections[address]
            if self._address in _planes:
                self._notify_broken(address)

    def _notify_broken(self, address: str) -> None:
        for callback in tuple(self._broken_callbacks):
            callback(address)


class _MemoryConnection:
    """One connection; what crosses it takes a turn of the loop, in order. While the network is
    severed it waits, the end of the connection too: each end learns only then of the other's."""

    def __init__(self, here: MemoryRequests, there: MemoryRequests) -> None:
        self._client = here
        self._server = there
        self._loop = asyncio.get_running_loop()
        self._client_closed = False
        self._server_closed = False
        self._held_messages: list[Callable[[], object]] = []
        self.streams = ClientStreams(self)
        self._send_queue = SendQueue(self._schedule_delivery)

    def send_open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"a request of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
        self._send(partial(self._on_open, stream, endpoint, context, window_bytes, payload))

    def send_cancel(self, stream: int) -> None:
        self._send(partial(self._on_cancel, stream))

    def send_credit(self, stream: int, size_bytes: int) -> None:
        self._send(partial(self._on_credit, stream, size_bytes))

    def close_client(self) -> None:
        """The caller's end breaks it: its calls fail, handlers are cancelled when they hear it."""
        self._end_calls()
        self._run_or_hold(self._end_handlers)

    def close_server(self) -> None:
        """The handlers' end is gone: they are cancelled, calls fail when they hear it."""
        self._end_handlers()
        self._run_or_hold(self._end_calls)

    def deliver_held(self) -> None:
        """The network may be whole again: what waited arrives."""
        if self._is_severed:
            return
        held, self._held_messages = self._held_messages, []
        self._client.stalled.discard(self)
        self._server.stalled.discard(self)
        for crossing in held:
            crossing()

    @property
    def _is_severed(self) -> bool:
        return self._client.severed or self._server.severed

    def _send(self, crossing: Callable[[], object]) -> None:
        if self._is_severed:
            self._hold(crossing)
        else:
            self._loop.call_soon(crossing)

    def _run_or_hold(self, crossing: Callable[[], object]) -> None:
        if self._is_severed:
            self._hold(crossing)
        else:
            crossing()

    def _hold(self, crossing: Callable[[], object]) -> None:
        self._held_messages.append(crossing)
        self._client.stalled.add(self)
        self._server.stalled.add(self)

    def _end_calls(self) -> None:
        if not self._client_closed:
            self._client_closed = True
            self._client.remove_connection(self, self._server.address)
            self.streams.fail(WorkerFailed(f"the connection to {self._server.address} broke"))

    def _end_handlers(self) -> None:
        if not self._server_closed:
            self._server_closed = True
            self._server.incoming.discard(self)
            self._send_queue.cancel_all()

    def _schedule_delivery(self) -> None:
        self._send(self._deliver)

    def _on_open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        if not self._server_closed:
            incoming = ServerStream(self._send_queue, stream, context, window_bytes)
            self._server.endpoints.start(endpoint, payload, incoming)

    def _on_cancel(self, stream: int) -> None:
        if (incoming := self._send_queue.open_streams.get(stream)) is not None:
            incoming.cancel()

    def _on_credit(self, stream: int, size_bytes: int) -> None:
        if (incoming := self._send_queue.open_streams.get(stream)) is not None:
            incoming.release(size_bytes)

    def _deliver(self) -> None:
        outbox = self._send_queue
        ends = set(outbox.ends)
        items = [
            (stream, END_STREAM if index in ends else 0, payload)
            for index, (stream, payload) in enumerate(
                zip(outbox.streams, outbox.payloads, strict=True)
            )
        ]
        outbox.clear()
        self.streams.deliver(items)
