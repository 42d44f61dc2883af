"""One connection at the callers' end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo.communication.frames import unpack_items
from dynamo.communication.handshake import pack_hello, read_hello
from dynamo.communication.link import Flusher, Link
from dynamo.communication.requests.calls import Calls
from dynamo.communication.requests.messages import (
    DATA,
    GOAWAY,
    PLANE,
    pack_cancel,
    pack_credit,
    pack_open,
)
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, ProtocolError, WorkerFailed


class Dialled:
    """Calls to one incarnation of one process. Awaiting `greeted` raises `InstanceGone` where
    another incarnation answers, `ProtocolError` where no version is shared."""

    def __init__(
        self,
        incarnation: str,
        flusher: Flusher,
        *,
        on_retired: Callable[[Dialled], None],
        on_lost: Callable[[Dialled], None],
    ) -> None:
        self.link = Link(self, flusher)
        self.calls = Calls(self)
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._incarnation = incarnation
        self._on_retired = on_retired
        self._on_lost = on_lost
        self._retired = False

    def open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        self.link.write(pack_open(stream, endpoint, context, window_bytes, payload))

    def cancel(self, stream: int) -> None:
        self.link.write(pack_cancel(stream))

    def credit(self, stream: int, size_bytes: int) -> None:
        self.link.write(pack_credit(stream, size_bytes))

    def retire(self) -> None:
        """Open no more calls here; close when the last one ends."""
        self._retired = True
        self._on_retired(self)
        self._close_when_done()

    def abort(self) -> None:
        """Close at once."""
        self.greeted.cancel()
        self.link.abort()

    def on_connect(self) -> None:
        self.link.write(pack_hello(PLANE))

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        if kind == DATA and self.greeted.done():
            self.calls.deliver(unpack_items(body, count))
            if self._retired:
                self._close_when_done()
        elif not self.greeted.done():
            self._greet(kind, body)
        elif kind == GOAWAY:
            self.retire()
        else:
            raise ProtocolError(f"a frame of kind {kind} from a handler")

    def on_lost(self, error: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(InstanceGone("the connection closed during the handshake"))
        self.calls.fail(WorkerFailed(f"the connection to the instance broke: {error or 'closed'}"))
        self._on_lost(self)

    def _greet(self, kind: int, body: bytes) -> None:
        try:
            hello, _ = read_hello(kind, body, PLANE)
        except ProtocolError as error:
            self.greeted.set_exception(error)
            raise
        if hello.incarnation != self._incarnation:
            self.greeted.set_exception(InstanceGone("another process answers there now"))
            self.abort()
            return
        self.link.greeted()
        self.greeted.set_result(None)

    def _close_when_done(self) -> None:
        if not len(self.calls):
            self.link.close()
