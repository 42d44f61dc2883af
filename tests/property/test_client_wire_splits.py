"""Properties of the client library's parsers: any split of the bytes gives the same result."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dynamo_client.http1 import ResponseParser
from dynamo_client.streams import SseParser

cuts = st.lists(st.integers(min_value=0, max_value=2000), max_size=30)


def split(data: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(data)) for cut in at), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(places)]
    return [part for part in parts if part]


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), cuts, st.booleans())
def test_chunked_bodies(chunks: list[bytes], at: list[int], trailer: bool) -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    end = b"0\r\n" + (b"x: y\r\n" if trailer else b"") + b"\r\n"
    reader = ResponseParser()

    body_bytes = b"".join(reader.feed(part) for part in split(head + body + end, at))

    assert body_bytes == b"".join(chunks)
    assert reader.complete
    assert reader.reusable


@given(st.binary(max_size=200), cuts)
def test_sized_bodies(body: bytes, at: list[int]) -> None:
    head = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(body)
    reader = ResponseParser()

    body_bytes = b"".join(reader.feed(part) for part in split(head + body, at))

    assert body_bytes == body
    assert reader.head is not None
    assert reader.head.status == 404
    assert reader.reusable


texts = st.text(st.characters(exclude_categories=["Cs", "Zs", "Cc"]), min_size=1, max_size=20)


@given(st.lists(texts, max_size=8), st.sampled_from(["\n", "\r\n", "\r"]), cuts)
def test_events(data: list[str], line_end: str, at: list[int]) -> None:
    stream = "".join(f": c{line_end}data: {text}{line_end * 2}" for text in data).encode()
    reader = SseParser()

    body_bytes = [event for part in split(stream, at) for event in reader.feed(part)]
    if last := reader.feed_eof():
        body_bytes.append(last)

    assert [event.decode().strip() for event in body_bytes] == [text.strip() for text in data]
