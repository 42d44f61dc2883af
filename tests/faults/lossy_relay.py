"""A relay that drops one stream of a connection, and a request plane behind it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any

from tests.support.relay import Relay

from dynamo.communication.frames import (
    END_STREAM,
    MAX_FRAME_BYTES,
    FrameSplitter,
    pack_frame,
    pack_items,
    unpack_items,
)
from dynamo.communication.requests import Requests
from dynamo.communication.requests.protocol import DATA


class StreamLoss:
    """Drops the items of one stream from a worker's frames.

    Once `on` is True, the stream of the next item is dropped until its end. `lost` counts items.
    """

    def __init__(self) -> None:
        self.on = False
        self.lost = 0
        self._stream = 0
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)

    def __call__(self, data: bytes) -> bytes:
        return b"".join(starmap(self._frame, self._splitter.feed(data)))

    def _frame(self, kind: int, count: int, body: bytes) -> bytes:
        if kind != DATA or not self.on:
            return pack_frame(kind, body, count)
        streams, payloads, ends = list[int](), list[bytes](), list[int]()
        for stream, flags, payload in unpack_items(body, count):
            self._stream = self._stream or stream
            if stream == self._stream:
                self.lost += 1
                self.on = self.on and not flags & END_STREAM
                continue
            if flags:
                ends.append(len(streams))
            streams.append(stream)
            payloads.append(payload)
        return pack_items(DATA, streams, payloads, ends) if streams else b""


class LossyRelay(Relay):
    """A relay whose connections can lose a stream. `losses` has an entry per connection."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[StreamLoss] = []

    def make_reply_filter(self) -> Callable[[bytes], bytes]:
        self.losses.append(StreamLoss())
        return self.losses[-1]


class RelayedRequests:
    """A request plane whose published address is that of a relay."""

    def __init__(self, plane: Requests, relay: Relay) -> None:
        self._plane = plane
        self._relay = relay

    @property
    def address(self) -> str:
        host_port, _, incarnation = self._plane.address.removeprefix("tcp://").partition("/")
        self._relay.target_port = int(host_port.rpartition(":")[2])
        return f"tcp://127.0.0.1:{self._relay.port}/{incarnation}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)
