"""One connection at the handlers' end."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.communication.frames import pack_batches, pack_frame
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
    unpack_cancel,
    unpack_credit,
    unpack_open,
)
from dynamo.communication.requests.server_streams import SendQueue, ServerStream
from dynamo.core.errors import ProtocolError, WorkerFailed, encode_error

UNKNOWN_STREAM = "the instance does not work on this call any more, and its end was lost"


class ServerConnection:
    """Starts handlers for what the caller opens, sends what they say, one frame a turn."""

    def __init__(
        self,
        endpoints: Endpoints,
        flusher: TurnFlusher,
        incarnation: str,
        on_lost: Callable[[ServerConnection], None],
        secret: str = "",
    ) -> None:
        self.link = Link(self, flusher)
        self.link.before_write = self._pop_frames
        self._endpoints = endpoints
        self._handshake = ServerHandshake(self.link, PLANE, incarnation, secret)
        self._on_lost = on_lost
        self._send_queue = SendQueue(self.link.schedule_flush)
        self._going_away = False
        self._last_stream_id = 0

    def go_away(self) -> None:
        """Tell the caller, as soon as we speak, to open no more streams here."""
        self._going_away = True
        if self._handshake.done:
            self.link.write(pack_frame(GOAWAY))

    def on_connect(self) -> None:
        """The caller speaks first."""

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        del count
        if not self._handshake.done:
            if self._handshake.receive(kind, body) and self._going_away:
                self.go_away()
        elif kind == OPEN:
            self._open_stream(body)
        elif kind == CANCEL:
            if (stream := self._send_queue.open_streams.get(unpack_cancel(body))) is not None:
                stream.cancel()
        elif kind == CREDIT:
            number, size_bytes = unpack_credit(body)
            if (stream := self._send_queue.open_streams.get(number)) is not None:
                if size_bytes:
                    stream.release(size_bytes)
                else:
                    stream.on_silence_query()
            elif not size_bytes:
                self._send_queue.end_stream(number, encode_error(WorkerFailed(UNKNOWN_STREAM)))
        else:
            raise ProtocolError(f"a frame of kind {kind} from a caller")

    def on_lost(self, error: Exception | None) -> None:
        del error
        self._handshake.on_lost()
        self._send_queue.cancel_all()
        self._on_lost(self)

    def _open_stream(self, body: bytes) -> None:
        number, head, payload = unpack_open(body)
        if number <= self._last_stream_id:
            raise ProtocolError(f"stream {number} opened twice")
        self._last_stream_id = number
        stream = ServerStream(self._send_queue, number, head.context, head.window_bytes)
        self._endpoints.start(head.endpoint, payload, stream)

    def _pop_frames(self) -> list[bytes]:
        outbox = self._send_queue
        if not outbox.payloads:
            return []
        frames = pack_batches(DATA, outbox.streams, outbox.payloads, outbox.ends)
        outbox.clear()
        return frames
