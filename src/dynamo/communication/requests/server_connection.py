"""The handler's end of a connection to one caller."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.communication.frames import pack_batches, pack_frame, unpack_number
from dynamo.communication.handshake import ServerHandshake
from dynamo.communication.link import Link, TurnFlusher
from dynamo.communication.requests.endpoints import Endpoints
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
from dynamo.communication.transports import PlaneTransport
from dynamo.core.errors import ProtocolError, WorkerFailed, encode_error
from dynamo.core.shared_payload import ReceivedPayload

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
