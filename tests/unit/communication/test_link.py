"""A connection whose peer sends a large frame directly after the last frame of the handshake."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.communication.frames import MAX_HELLO_BYTES, pack_frame
from dynamo.communication.link import Link, LinkHandler, TurnFlusher

LARGE = MAX_HELLO_BYTES + 1
DATA = pack_frame(1) + pack_frame(2, bytes(LARGE)) + pack_frame(3, bytes(LARGE)) + pack_frame(4)


class _Handler(LinkHandler):
    """Takes the frame of kind 1 for the end of the handshake, if `proven`."""

    link: Link

    def __init__(self, *, proven: bool) -> None:
        self._proven = proven
        self.received: list[tuple[int, int]] = []

    def on_connect(self) -> None:
        pass

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        self.received.append((kind, len(body)))
        if kind == 1 and self._proven:
            self.link.accept_large_frames()

    def on_lost(self, error: Exception | None) -> None:
        pass


def make_link(*, proven: bool) -> tuple[Link, _Handler]:
    handler = _Handler(proven=proven)
    handler.link = Link(handler, TurnFlusher())
    return handler.link, handler


@pytest.mark.parametrize("cut", [len(DATA), 8, 12, 16, 1000, LARGE + 20])
async def test_a_large_frame_may_follow_in_the_same_packet(cut: int) -> None:
    link, handler = make_link(proven=True)
    link.data_received(DATA[:cut])
    if cut < len(DATA):
        link.data_received(DATA[cut:])
    await asyncio.sleep(0)
    assert handler.received == [(1, 0), (2, LARGE), (3, LARGE), (4, 0)]


async def test_a_stranger_may_send_no_large_frame(caplog: pytest.LogCaptureFixture) -> None:
    link, handler = make_link(proven=False)
    link.data_received(DATA)
    link.data_received(b"")
    assert handler.received == [(1, 0)]
    assert f"a frame of {LARGE} bytes" in str([vars(record) for record in caplog.records])
