"""A connection whose peer sends large frames behind the handshake, or many frames at once."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.communication import link as link_module
from dynamo.communication.frames import MAX_HELLO_BYTES, pack_frame
from dynamo.communication.link import MAX_TURN_S, Link, LinkHandler, TurnFlusher

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
    for _ in range(2):
        await asyncio.sleep(0)
    assert handler.received == [(1, 0), (2, LARGE), (3, LARGE), (4, 0)]


async def test_a_stranger_may_send_no_large_frame(caplog: pytest.LogCaptureFixture) -> None:
    link, handler = make_link(proven=False)
    link.data_received(DATA)
    link.data_received(b"")
    assert handler.received == [(1, 0)]
    assert f"a frame of {LARGE} bytes" in str([vars(record) for record in caplog.records])


class _Transport(asyncio.Transport):
    """A transport whose peer has sent everything already."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = True
        self.aborted = False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class _SlowHandler(_Handler):
    """Takes so long that a turn has four frames."""

    now = 0.0

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        super().on_frame(kind, count, body)
        self.now += MAX_TURN_S / 3.5


def make_slow_link(monkeypatch: pytest.MonkeyPatch) -> tuple[Link, _Handler]:
    handler = _SlowHandler(proven=False)
    handler.link = Link(handler, TurnFlusher())
    monkeypatch.setattr(link_module, "monotonic", lambda: handler.now)
    return handler.link, handler


async def test_the_loop_runs_between_the_frames_of_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, handler = make_slow_link(monkeypatch)
    link.connection_made(transport := _Transport())
    frames = 3 * 4
    link.data_received(b"".join(pack_frame(2 + number % 8) for number in range(frames)))
    turns = 1
    while not transport.reads:
        assert len(handler.received) == turns * 4
        await asyncio.sleep(0)
        turns += 1
        if turns == 2:
            link.data_received(pack_frame(11, b"later"))  # was on its way before the pause
    assert turns == 4
    kinds = [kind for kind, _ in handler.received]
    assert kinds == [*(2 + number % 8 for number in range(frames)), 11]


async def test_frames_that_wait_are_dropped_with_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, handler = make_slow_link(monkeypatch)
    link.connection_made(_Transport())
    link.data_received(pack_frame(2) * 8)
    link.abort()
    await asyncio.sleep(0)
    assert len(handler.received) == 4
