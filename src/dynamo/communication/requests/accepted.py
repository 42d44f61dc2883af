"""One connection at the handlers' end."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.communication.frames import pack_batches, pack_frame
from dynamo.communication.greeting import Welcome
from dynamo.communication.link import Flusher, Link
from dynamo.communication.requests.endpoints import Endpoints
from dynamo.communication.requests.messages import (
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
from dynamo.communication.requests.streams import Outbox, Stream
from dynamo.core.errors import ProtocolError, WorkerFailed, encode_error

LOST = "the instance does not work on this call any more, and its end was lost"


class Accepted:
    """Starts handlers for what the caller opens, sends what they say, one frame a turn."""

    def __init__(
        self,
        endpoints: Endpoints,
        flusher: Flusher,
        incarnation: str,
        on_lost: Callable[[Accepted], None],
        secret: str = "",
    ) -> None:
        self.link = Link(self, flusher)
        self.link.before_write = self._frames
        self._endpoints = endpoints
        self._welcome = Welcome(self.link, PLANE, incarnation, secret)
        self._on_lost = on_lost
        self._outbox = Outbox(self.link.arm)
        self._leaving = False
        self._last = 0

    def go_away(self) -> None:
        """Tell the caller, as soon as we speak, to open no more streams here."""
        self._leaving = True
        if self._welcome.done:
            self.link.write(pack_frame(GOAWAY))

    def on_connect(self) -> None:
        """The caller speaks first."""

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        del count
        if not self._welcome.done:
            if self._welcome.read(kind, body) and self._leaving:
                self.go_away()
        elif kind == OPEN:
            self._open(body)
        elif kind == CANCEL:
            if (stream := self._outbox.open.get(unpack_cancel(body))) is not None:
                stream.leave()
        elif kind == CREDIT:
            number, size_bytes = unpack_credit(body)
            if (stream := self._outbox.open.get(number)) is not None:
                if size_bytes:
                    stream.release(size_bytes)
                else:
                    stream.asked_after()
            elif not size_bytes:
                self._outbox.end(number, encode_error(WorkerFailed(LOST)))
        else:
            raise ProtocolError(f"a frame of kind {kind} from a caller")

    def on_lost(self, error: Exception | None) -> None:
        del error
        self._welcome.lost()
        self._outbox.leave_all()
        self._on_lost(self)

    def _open(self, body: bytes) -> None:
        number, head, payload = unpack_open(body)
        if number <= self._last:
            raise ProtocolError(f"stream {number} opened twice")
        self._last = number
        stream = Stream(self._outbox, number, head.context, head.window_bytes)
        self._endpoints.start(head.endpoint, payload, stream)

    def _frames(self) -> list[bytes]:
        outbox = self._outbox
        if not outbox.payloads:
            return []
        frames = pack_batches(DATA, outbox.streams, outbox.payloads, outbox.ends)
        outbox.clear()
        return frames
