"""Properties of frames: any split of the bytes gives the same frames; garbage is refused."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.communication.events import protocol as events
from dynamo.communication.frames import (
    END_STREAM,
    HEADER,
    MAX_FRAME_BYTES,
    FrameSplitter,
    pack_batches,
    pack_frame,
    pack_items,
    unpack_items,
    unpack_number,
)
from dynamo.communication.handshake import check_version, decode_hello
from dynamo.communication.requests import protocol as requests
from dynamo.core.context import Context
from dynamo.core.errors import ProtocolError

payloads = st.lists(st.binary(max_size=300), max_size=30)
numbers = st.integers(0, (1 << 32) - 1)


def chopped(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(places)]


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=200))), st.lists(st.integers(0)))
def test_frames_survive_any_split(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(pack_frame(kind, body, 7) for kind, body in frames)
    splitter = FrameSplitter()
    read = [frame for part in chopped(stream, cuts) for frame in splitter.feed(part)]
    assert read == [(kind, 7, body) for kind, body in frames]


@given(st.lists(st.tuples(numbers, st.binary(max_size=300), st.booleans()), max_size=40))
def test_items_round_trip(items: list[tuple[int, bytes, bool]]) -> None:
    ends = [index for index, item in enumerate(items) if item[2]]
    frame = pack_items(9, [item[0] for item in items], [item[1] for item in items], ends)
    ((kind, count, body),) = FrameSplitter().feed(frame)
    assert (kind, count) == (9, len(items))
    expected = [(stream, END_STREAM if end else 0, payload) for stream, payload, end in items]
    assert list(unpack_items(body, count)) == expected


@given(st.integers(1, 20_000), st.integers(0, 2000), st.data())
def test_batches_hold_the_same_items(count: int, size: int, data: st.DataObject) -> None:
    ends = data.draw(st.sets(st.integers(0, count - 1), max_size=5))
    streams = list(range(count))
    frames = pack_batches(3, streams, [bytes(size)] * count, sorted(ends))
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    items = [
        item
        for frame in frames
        for _, n, body in splitter.feed(frame)
        for item in unpack_items(body, n)
    ]
    assert [item[0] for item in items] == streams
    assert {index for index, item in enumerate(items) if item[1]} == ends
    assert all(len(frame) < (3 << 20) for frame in frames)


@given(st.binary(max_size=400), st.lists(st.integers(0)))
def test_garbage_is_refused_or_waits(garbage: bytes, cuts: list[int]) -> None:
    splitter = FrameSplitter()
    readers = [
        lambda kind, count, body: check_version(decode_hello(kind, body, "requests")),
        lambda kind, count, body: list(unpack_items(body, count)),
        lambda kind, count, body: events.unpack_events(body, count),
        lambda kind, count, body: events.unpack_position(body),
        lambda kind, count, body: unpack_number(body),
        lambda kind, count, body: requests.unpack_credit(body),
    ]
    try:
        frames = [frame for part in chopped(garbage, cuts) for frame in splitter.feed(part)]
    except ProtocolError:
        return
    for frame in frames:
        for read in readers:
            with suppress(ProtocolError):
                read(*frame)


@given(st.integers(0, 65_535), st.binary(max_size=400))
def test_a_wrong_item_table_is_refused(count: int, body: bytes) -> None:
    try:
        items = list(unpack_items(body, count))
    except ProtocolError:
        return
    assert len(items) == count
    assert 8 * count + sum(len(payload) for _, _, payload in items) == len(body)


def test_a_frame_over_the_limit_is_refused_by_its_header() -> None:
    with pytest.raises(ProtocolError):
        FrameSplitter(1000).feed(HEADER.pack(1001, 1, 0, 0))
    assert FrameSplitter(1000).feed(HEADER.pack(1000, 1, 0, 0)) == []


@given(numbers, st.text(max_size=30), st.integers(0, 1 << 40), st.binary(max_size=500))
def test_open_frames_round_trip(stream: int, endpoint: str, window: int, payload: bytes) -> None:
    context = Context("r", attempt=3, metadata={"a": "b"})
    frame = requests.pack_open(stream, endpoint, context, window, payload)
    ((kind, _, body),) = FrameSplitter().feed(frame)
    number, header, rest = requests.unpack_open(body)
    assert (kind, number, rest) == (requests.OPEN, stream, payload)
    assert (header.endpoint, header.window_bytes, header.context) == (endpoint, window, context)


@given(numbers, st.integers(1, 1 << 60), payloads)
def test_events_round_trip(number: int, first: int, batch: list[bytes]) -> None:
    (frame,) = events.pack_events(events.EVENTS, number, first, batch)
    ((_, count, body),) = FrameSplitter().feed(frame)
    assert events.unpack_events(body, count) == (number, first, batch)


def test_large_batches_of_events_keep_their_sequences() -> None:
    batch = [bytes([index % 256]) * 400_000 for index in range(9)]
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    read: dict[int, bytes] = {}
    frames = events.pack_events(events.EVENTS, 1, 50, batch)
    for frame in frames:
        for _, count, body in splitter.feed(frame):
            _, first, received = events.unpack_events(body, count)
            read.update(enumerate(received, first))
    assert len(frames) > 1
    assert read == dict(enumerate(batch, 50))
