"""One connection at the callers' end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dynamo.communication.frames import unpack_items
from dynamo.communication.greeting import Greeting
from dynamo.communication.link import Flusher, Link
from dynamo.communication.requests.calls import Calls
from dynamo.communication.requests.messages import (
    DATA,
    GOAWAY,
    PLANE,
    pack_ask,
    pack_cancel,
    pack_credit,
    pack_open,
)
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, ProtocolError, WorkerFailed

ASK_S: Final = 2.0
"""Streams that have brought nothing for so long are asked after."""


class Dialled:
    """Calls to one incarnation of one process. Once retired it closes with its last call."""

    def __init__(
        self,
        incarnation: str,
        flusher: Flusher,
        *,
        on_retired: Callable[[Dialled], None],
        on_lost: Callable[[Dialled], None],
        secret: str = "",
    ) -> None:
        self.link = Link(self, flusher)
        self.calls = Calls(self)
        self.greeting = Greeting(self.link, PLANE, incarnation, secret)
        self._on_retired = on_retired
        self._on_lost = on_lost
        self._retired = False
        self._asking: asyncio.TimerHandle | None = None

    def open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        self.link.write(pack_open(stream, endpoint, context, window_bytes, payload))
        if self._asking is None:
            self._asking = asyncio.get_running_loop().call_later(ASK_S, self._ask)

    def cancel(self, stream: int) -> None:
        self.link.write(pack_cancel(stream))
        if self._retired:
            self._close_when_done()

    def credit(self, stream: int, size_bytes: int) -> None:
        self.link.write(pack_credit(stream, size_bytes))

    def retire(self) -> None:
        """Open no more calls here; close when the last one ends."""
        self._retired = True
        self._on_retired(self)
        self._close_when_done()

    def on_connect(self) -> None:
        self.greeting.begin()

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        if not self.greeting.over:
            self.greeting.read(kind, body)
        elif kind == DATA:
            self.calls.deliver(unpack_items(body, count))
            if self._retired:
                self._close_when_done()
        elif kind == GOAWAY:
            self.retire()
        else:
            raise ProtocolError(f"a frame of kind {kind} from a handler")

    def on_lost(self, error: Exception | None) -> None:
        self.greeting.lost()
        if self._asking is not None:
            self._asking.cancel()
        self.calls.fail(WorkerFailed(f"the connection to the instance broke: {error or 'closed'}"))
        self._on_lost(self)

    def _ask(self) -> None:
        """Are the silent ones still in work there? One that waits or is slow is; of one whose end
        was lost nobody there knows. No stream is given up for its silence."""
        self._asking = None
        for stream in self.calls.silent():
            self.link.write(pack_ask(stream))
        if len(self.calls):
            self._asking = asyncio.get_running_loop().call_later(ASK_S, self._ask)

    def _close_when_done(self) -> None:
        if not len(self.calls):
            self.calls.fail(InstanceGone("the connection to the instance is closed"))
            self.link.close()
