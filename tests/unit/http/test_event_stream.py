"""Server-sent events as foreign servers write them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.communication.http import event_stream
from dynamo.communication.http.event_stream import EventStream
from dynamo.core.clock import SystemClock
from dynamo.core.errors import MalformedAnswer
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time

BODY = (
    '\ufeff: comment\r\n\r\ndata: {"a": 1}\r\rdata:{"b": "犬"}\n\nid: 7\nretry: 5\n'
    'event: error\ndata: {"c":\ndata: 3}\n\nerror: {"d": 4}\n\ndata: [DONE]\r\n\r\n'
).encode()
EVENTS = [
    (b"", b'{"a": 1}'),
    (b"", '{"b": "犬"}'.encode()),
    (b"error", b'{"c":\n3}'),
    (b"error", b'{"d": 4}'),
    (b"", b"[DONE]"),
]


def read(*parts: bytes) -> list[tuple[bytes, bytes]]:
    stream = EventStream(SystemClock())
    return [event for part in parts for event in stream.feed(part)] + stream.end()


@given(st.lists(st.integers(3, len(BODY) - 1), max_size=8))
def test_events_do_not_depend_on_how_they_arrive(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(BODY)]
    assert read(*(BODY[start:end] for start, end in pairwise(places))) == EVENTS


def test_events_without_an_empty_line_between_them_are_separated() -> None:
    stream = EventStream(SystemClock())
    assert stream.feed(b'data: {"a": 1}\ndata: {"b": 2}\n') == [(b"", b'{"a": 1}')]
    assert stream.feed(b"data: [DONE]\n") == [(b"", b'{"b": 2}'), (b"", b"[DONE]")]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_end_of_the_body_ends_an_event(end: bytes) -> None:
    assert read(b'data: {"a": 1}' + end) == [(b"", b'{"a": 1}')]


def test_a_body_of_json_is_an_event() -> None:
    assert read(b"\n", b'{"a":\n\n', b"1}\n") == []
    assert read(b' {"a":\n\n', b"1}\n") == [(b"", b' {"a":\n\n1}\n')]


def test_a_line_that_is_no_part_of_an_event_is_kept_for_the_error() -> None:
    stream = EventStream(SystemClock())
    assert stream.feed(b": x\nid: 1\n<html>\n<body>\n") == []
    assert stream.unread == b"<html>"


@pytest.mark.parametrize(
    "part", [b"x" * 1000, b"data: {\ndata: 1\n", b": x", b'{"a": 1'], ids=["line", "data", "c", "j"]
)
def test_an_event_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 10_000)
    with pytest.raises(MalformedAnswer, match="more than 10000 bytes"):
        read(*[part] * 10_000)


def test_an_event_that_drips_is_an_error() -> None:
    async def main(clock: VirtualClock) -> None:
        stream = EventStream(clock)
        stream.feed(b"data: {}\n\ndata")
        for _ in range(15):
            await clock.sleep(1.0)
            stream.feed(b"x")
        await clock.sleep(1.0)
        with pytest.raises(MalformedAnswer, match="took more than 15 s"):
            stream.feed(b"x")

    run_in_virtual_time(main)
