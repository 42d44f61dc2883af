"""The request plane over TCP: one connection per process and called address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Self

from dynamo.communication.frames import pack_batches, pack_frame, unpack_number
from dynamo.communication.handshake import ServerHandshake
from dynamo.communication.link import Link, TurnFlusher, close_links
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.requests.client_connection import ClientConnection
from dynamo.communication.requests.endpoints import Endpoints
from dynamo.communication.requests.plane import FlowWindow, RequestHandler, Requests, Sink
from dynamo.communication.requests.protocol import (
    CANCEL,
    CREDIT,
    DATA,
    GOAWAY,
    OPEN,
    PLANE,
    RELEASE,
    SHARE,
    SILENCE_QUERY_BYTES,
    unpack_credit,
    unpack_open,
    unpack_share,
)
from dynamo.communication.requests.server_streams import SendQueue, ServerStream
from dynamo.communication.transports import PlaneTransport, TcpPlaneTransport
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, ProtocolError, WorkerFailed, encode_error
from dynamo.core.shared_payload import ReceivedPayload, SharedPayload
from dynamo.core.tasks import BackgroundTasks
from dynamo.telemetry.logs import request_id

UNKNOWN_STREAM = "the instance has ended this call, but the end of its answer was lost"


class ServerConnection:
    """Starts handlers for opened streams and sends their items, one frame per loop iteration."""

    def __init__(
        self,
        endpoints: Endpoints,
        flusher: TurnFlusher,
        transport: PlaneTransport,
        on_lost: Callable[[ServerConnection], None],
    ) -> None:
        self.link = Link(self, flusher)
        self.link.before_write = self._pop_frames
        self._endpoints = endpoints
        self._handshake = ServerHandshake(self.link, PLANE, transport)
        self._on_lost = on_lost
        self._send_queue = SendQueue(self.link.schedule_flush)
        self._going_away = False
        self._last_stream_id = 0
        self._shared: dict[int, ReceivedPayload] = {}

    def go_away(self) -> None:
        """Tell the caller to open no more streams, once the handshake is complete."""
        self._going_away = True
        if self._handshake.done:
            self.link.write(pack_frame(GOAWAY))

    def on_connect(self) -> None:
        """Wait for the caller's hello."""

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        del count
        if not self._handshake.done:
            if self._handshake.receive(kind, body) and self._going_away:
                self.go_away()
        elif kind == OPEN:
            self._open_stream(body)
        elif kind == CANCEL:
            if (stream := self._send_queue.open_streams.get(unpack_number(body))) is not None:
                stream.cancel()
        elif kind == CREDIT:
            number, size_bytes = unpack_credit(body)
            stream = self._send_queue.open_streams.get(number)
            if size_bytes != SILENCE_QUERY_BYTES:
                if stream is not None:
                    stream.release(size_bytes)
            elif stream is not None:
                stream.on_silence_query()
            else:
                self._send_queue.end_stream(number, encode_error(WorkerFailed(UNKNOWN_STREAM)))
        else:
            self._on_share_frame(kind, body)

    def on_lost(self, error: Exception | None) -> None:
        del error
        self._handshake.on_lost()
        self._shared.clear()
        self._send_queue.cancel_all()
        self._on_lost(self)

    def _on_share_frame(self, kind: int, body: bytes) -> None:
        if kind not in (SHARE, RELEASE):
            raise ProtocolError(f"a frame of kind {kind} from a caller")
        number, payload = unpack_share(body)
        if kind == RELEASE:
            self._shared.pop(number, None)
        elif number in self._shared:
            raise ProtocolError(f"payload {number} shared twice")
        else:
            self._shared[number] = ReceivedPayload(payload)

    def _open_stream(self, body: bytes) -> None:
        number, header, payload = unpack_open(body)
        if number <= self._last_stream_id:
            raise ProtocolError(f"stream {number} opened twice")
        self._last_stream_id = number
        stream = ServerStream(self._send_queue, number, header.context, header.window_bytes)
        if header.shared:
            stream.shared = self._shared.get(header.shared)
            if stream.shared is None:
                stream.end(ProtocolError(f"payload {header.shared} is not shared"))
                return
        self._endpoints.start(header.endpoint, payload, stream)

    def _pop_frames(self) -> list[bytes]:
        queue = self._send_queue
        if not queue.payloads:
            return []
        frames = pack_batches(DATA, queue.streams, queue.payloads, queue.ends)
        queue.clear()
        return frames


class TcpRequests(Requests):
    """The backend `tcp://HOST:PORT`. Planes over several transports may share `Endpoints`."""

    def __init__(self, transport: PlaneTransport, endpoints: Endpoints | None = None) -> None:
        super().__init__()
        self._transport = transport
        self._listen_lock = asyncio.Lock()
        self._flusher = TurnFlusher()
        self._endpoints = Endpoints() if endpoints is None else endpoints
        self._endpoints.on_empty.append(self._go_away)
        self._server_connections: dict[ServerConnection, None] = {}
        self._client_connections: dict[str, ClientConnection] = {}
        self._open_client_connections: dict[ClientConnection, None] = {}
        self._pending_dials: dict[str, asyncio.Task[ClientConnection | DynamoError]] = {}
        self._tasks = BackgroundTasks()
        self._closed = False

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Create a plane that does not listen yet. Raises `ConfigError`."""
        return cls(await TcpPlaneTransport.open(url, options))

    @property
    def address(self) -> str:
        return self._transport.address

    async def serve(self, endpoint: str, handler: RequestHandler) -> None:
        self._endpoints.serve(endpoint, handler)
        await self.listen()

    async def listen(self) -> None:
        """Accept connections if the plane does not do so yet."""
        async with self._listen_lock:
            if not self._transport.is_listening:
                await self._transport.listen(self._accept)

    async def withdraw(self, endpoint: str, drain_s: float | None = 0.0) -> None:
        await self._endpoints.withdraw(endpoint, drain_s)

    async def ensure_connected(self, address: str) -> None:
        """Connect to an instance. A failure goes to the `on_connection_broken` callbacks only."""
        with suppress(InstanceGone):
            await self._connect(address)

    def is_connected(self, address: str) -> bool:
        """Whether a call to `address` needs no new connection."""
        connection = self._client_connections.get(address)
        return connection is not None and not connection.streams.exhausted

    def _go_away(self) -> None:
        """Tell callers to open no more streams here."""
        for connection in self._server_connections:
            connection.go_away()

    def call(
        self,
        address: str,
        endpoint: str,
        payload: bytes,
        context: Context,
        sink: Sink,
        *,
        window: FlowWindow | None = None,
        shared: SharedPayload | None = None,
    ) -> Coroutine[Any, Any, None]:
        connection = self._client_connections.get(address)
        if connection is None or connection.streams.exhausted:
            return self._connect_and_call(address, endpoint, payload, context, sink, window, shared)
        return connection.streams.call(endpoint, payload, context, sink, window, shared)

    async def _connect_and_call(self, address: str, *call_arguments: Any) -> None:
        connection = await self._connect(address)
        await connection.streams.call(*call_arguments)

    def count_calls(self) -> int:
        return self._endpoints.count_calls()

    def count_received_frames(self, address: str) -> int:
        connection = self._client_connections.get(address)
        return 0 if connection is None else connection.streams.frames_received

    def count_sent_bytes(self, address: str) -> tuple[int, int]:
        connection = self._client_connections.get(address)
        if connection is None:
            return 0, 0
        link = connection.link
        return link.written_bytes - link.unsent_bytes, link.unsent_bytes

    def disconnect(self, address: str) -> None:
        connection = self._client_connections.get(address)
        if connection is not None:
            connection.link.abort()

    async def close(self) -> None:
        self._closed = True
        self._transport.stop_listening()
        await self._endpoints.close()
        await self._tasks.close()
        for connection in self._open_client_connections:
            connection.streams.fail(WorkerFailed("this process closed its request plane"))
        await close_links(self._all_links())

    def abort(self) -> None:
        """Abort every connection, as a crash would. For tests."""
        self._transport.stop_listening()
        for link in self._all_links():
            link.abort()

    def _all_links(self) -> list[Link]:
        return [connection.link for connection in self._open_client_connections] + [
            connection.link for connection in self._server_connections
        ]

    def _accept(self) -> Link:
        connection = ServerConnection(
            self._endpoints, self._flusher, self._transport, self._on_server_lost
        )
        self._server_connections[connection] = None
        return connection.link

    async def _connect(self, address: str) -> ClientConnection:
        """Return the connection to `address`. Concurrent callers share one attempt."""
        if self._closed:
            raise InstanceGone("this process closed its request plane")
        dial = self._pending_dials.get(address)
        if dial is None:
            dial = self._pending_dials[address] = self._tasks.start(
                self._dial(address), f"dial {address}"
            )
            dial.add_done_callback(lambda _: self._pending_dials.pop(address, None))
        try:
            result = await asyncio.shield(dial)
        except asyncio.CancelledError:
            if dial.cancelled():  # by `close`, not by this caller
                raise InstanceGone("this process closed its request plane") from None
            raise
        if isinstance(result, DynamoError):
            raise type(result)(result.message, hint=result.hint)
        return result

    async def _dial(self, address: str) -> ClientConnection | DynamoError:
        request_id.set("")  # the connection outlives the request that needed it first
        try:
            incarnation = self._transport.incarnation_of(address)
        except InstanceGone as error:
            return error
        connection = ClientConnection(
            incarnation,
            self._flusher,
            on_retired=partial(self._on_retired, address),
            on_lost=partial(self._on_lost, address),
            secret=self._transport.secret,
        )
        try:
            await connection.handshake.connect(partial(self._transport.dial, address=address))
        except (OSError, TimeoutError, ProtocolError, InstanceGone) as error:
            self._notify_broken(address)
            refused = isinstance(error, ConnectionRefusedError)
            reason = "connection refused" if refused else str(error) or self._transport.silence_text
            return InstanceGone(f"{address} cannot be reached: {reason}")
        former = self._client_connections.get(address)
        if not connection.link.closed.is_set():
            self._client_connections[address] = connection
            self._open_client_connections[connection] = None
        if former is not None:
            former.retire()
        return connection

    def _on_server_lost(self, connection: ServerConnection) -> None:
        self._server_connections.pop(connection, None)

    def _on_retired(self, address: str, connection: ClientConnection) -> None:
        if self._client_connections.get(address) is connection:
            del self._client_connections[address]

    def _on_lost(self, address: str, connection: ClientConnection) -> None:
        self._open_client_connections.pop(connection, None)
        if self._client_connections.get(address) is connection:
            del self._client_connections[address]
            self._notify_broken(address)

    def _notify_broken(self, address: str) -> None:
        if not self._closed:
            super()._notify_broken(address)
