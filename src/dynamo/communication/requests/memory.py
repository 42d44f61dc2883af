"""The request plane within one process, without encoding.

Items of a handler reach the caller in the next iteration of the loop, as over a socket.
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
from dynamo.core.shared_payload import ReceivedPayload, SharedPayload

_planes: dict[str, MemoryRequests] = {}


class MemoryRequests(Requests):
    """The backend `memory:`. Each object stands for one process."""

    def __init__(self) -> None:
        super().__init__()
        self._address = f"memory://{new_incarnation()}"
        self.endpoints = Endpoints()
        self._connections: dict[str, _MemoryConnection] = {}
        self.incoming: set[_MemoryConnection] = set()
        self.severed = False
        self.stalled: set[_MemoryConnection] = set()

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Create a plane. All `memory:` planes of this process can call each other."""
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
        shared: SharedPayload | None = None,
    ) -> None:
        connection = self._connections.get(address) or self._connect(address)
        await connection.streams.call(endpoint, payload, context, sink, window, shared)

    def count_received_frames(self, address: str) -> int:
        connection = self._connections.get(address)
        return 0 if connection is None else connection.streams.frames_received

    def disconnect(self, address: str) -> None:
        connection = self._connections.get(address)
        if connection is not None:
            connection.close_client()

    async def close(self) -> None:
        _planes.pop(self._address, None)
        await self.endpoints.close()
        await asyncio.sleep(0)  # delivers the items that the handlers' ends have queued
        self.abort()

    def abort(self) -> None:
        """Abort every connection, as a crash would. For tests."""
        _planes.pop(self._address, None)
        for connection in list(self._connections.values()):
            connection.close_client()
        for connection in list(self.incoming):
            connection.close_server()

    def sever(self) -> None:
        """Hold all messages from and to this process, like a broken network. For tests."""
        self.severed = True

    def rejoin(self) -> None:
        """End `sever`: held messages arrive in order."""
        self.severed = False
        for connection in list(self.stalled):
            connection.deliver_held()

    def _connect(self, address: str) -> _MemoryConnection:
        server = _planes.get(address)
        if server is None or self._address not in _planes:
            self._notify_broken(address)
            raise InstanceGone(f"no instance has the address {address}")
        connection = self._connections[address] = _MemoryConnection(self, server)
        server.incoming.add(connection)
        return connection

    def remove_connection(self, connection: _MemoryConnection, address: str) -> None:
        """Forget a closed connection to `address`."""
        if self._connections.get(address) is connection:
            del self._connections[address]
            if self._address in _planes:
                self._notify_broken(address)


class _MemoryConnection:
    """A connection whose messages arrive in order, in the next iteration of the loop.

    While an end is severed, messages are held. So is the end of the connection.
    """

    can_share = True

    def __init__(self, client: MemoryRequests, server: MemoryRequests) -> None:
        self._client = client
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._client_closed = False
        self._server_closed = False
        self._held_messages: list[Callable[[], object]] = []
        self._shared: dict[int, ReceivedPayload] = {}
        self.streams = ClientStreams(self)
        self._send_queue = SendQueue(lambda: self._send(self._deliver))

    def send_open(
        self,
        stream: int,
        endpoint: str,
        context: Context,
        window_bytes: int,
        payload: bytes,
        shared: int = 0,
    ) -> None:
        _check_size(payload)
        self._send(partial(self._on_open, stream, endpoint, context, window_bytes, payload, shared))

    def send_share(self, number: int, payload: bytes) -> None:
        _check_size(payload)
        self._send(partial(self._shared.__setitem__, number, ReceivedPayload(payload)))

    def send_release(self, number: int) -> None:
        self._send(partial(self._shared.pop, number, None))

    def send_cancel(self, stream: int) -> None:
        self._send(partial(self._on_cancel, stream))

    def send_credit(self, stream: int, size_bytes: int) -> None:
        self._send(partial(self._on_credit, stream, size_bytes))

    def close_client(self) -> None:
        """Close the caller's end: calls fail, and handlers are cancelled once it arrives."""
        self._end_calls()
        self._send(self._end_handlers, at_once=True)

    def close_server(self) -> None:
        """Close the handler's end: handlers are cancelled, and calls fail once it arrives."""
        self._end_handlers()
        self._send(self._end_calls, at_once=True)

    def deliver_held(self) -> None:
        """Deliver held messages in order unless an end is still severed."""
        if self._is_severed:
            return
        messages, self._held_messages = self._held_messages, []
        self._client.stalled.discard(self)
        self._server.stalled.discard(self)
        for message in messages:
            message()

    @property
    def _is_severed(self) -> bool:
        return self._client.severed or self._server.severed

    def _send(self, message: Callable[[], object], *, at_once: bool = False) -> None:
        if self._is_severed:
            self._held_messages.append(message)
            self._client.stalled.add(self)
            self._server.stalled.add(self)
        elif at_once:
            message()
        else:
            self._loop.call_soon(message)

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

    def _on_open(
        self,
        stream_id: int,
        endpoint: str,
        context: Context,
        window_bytes: int,
        payload: bytes,
        shared: int,
    ) -> None:
        if not self._server_closed:
            stream = ServerStream(self._send_queue, stream_id, context, window_bytes)
            if shared:
                stream.shared = self._shared[shared]
            self._server.endpoints.start(endpoint, payload, stream)

    def _on_cancel(self, stream_id: int) -> None:
        if (stream := self._send_queue.open_streams.get(stream_id)) is not None:
            stream.cancel()

    def _on_credit(self, stream_id: int, size_bytes: int) -> None:
        if (stream := self._send_queue.open_streams.get(stream_id)) is not None:
            stream.release(size_bytes)

    def _deliver(self) -> None:
        queue = self._send_queue
        ends = set(queue.ends)
        items = [
            (stream, END_STREAM if index in ends else 0, payload)
            for index, (stream, payload) in enumerate(
                zip(queue.streams, queue.payloads, strict=True)
            )
        ]
        queue.clear()
        self.streams.deliver(items)


def _check_size(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise TooLarge(f"a request of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
