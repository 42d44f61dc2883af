"""The reader of requests by itself: targets, and bytes counted request by request."""

from __future__ import annotations

import pytest

from dynamo.communication.http.errors import HeadersTooLarge
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import Request, RequestReader, split_target
from dynamo.core.errors import InvalidRequest, TooLarge


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("/a/b", ("/a/b", "")),
        ("/a?x=1&y=2", ("/a", "x=1&y=2")),
        ("/a?to=http://other/b", ("/a", "to=http://other/b")),
        ("/http://other/b", ("/http://other/b", "")),
        ("http://host:1/a/b?x=1", ("/a/b", "x=1")),
        ("http://host", ("/", "")),
        ("*", ("*", "")),
        ("host:443", ("host:443", "")),
        ("/a%20b%2Fc?d%20e", ("/a b/c", "d%20e")),
        ("/a#b?c", ("/a", "")),
        ("/a?b#c", ("/a", "b")),
    ],
)
def test_path_and_query_of_a_target(target: str, found: tuple[str, str]) -> None:
    assert split_target(target.encode()) == found


LIMITS = HttpLimits(max_header_bytes=300, max_headers=5, max_body_bytes=1000)
LARGE = b"POST /%d HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 200 + b"\r\ncontent-length: 400\r\n\r\n"


def reader_of(limits: HttpLimits = LIMITS) -> tuple[RequestReader, list[Request]]:
    found: list[Request] = []
    return RequestReader(limits, found.append, lambda: None), found


def feed_all(reader: RequestReader, sent: bytes, cut: int) -> None:
    for at in range(0, len(sent), cut):
        assert reader.feed(sent[at : at + cut])


@pytest.mark.parametrize("cut", [1, 7, 250, 631, 5_000, 1 << 20])
def test_bytes_are_counted_anew_for_every_request(cut: int) -> None:
    reader, found = reader_of()
    sent = b"".join(LARGE % number + b"b" * 400 for number in range(10, 30))
    feed_all(reader, sent, cut)
    assert [one.path for one in found] == [f"/{number}" for number in range(10, 30)]
    assert {one.body for one in found} == {b"b" * 400}
    assert (reader.stage, reader.messages_started) == ("idle", 20)


@pytest.mark.parametrize("cut", [1, 50, 5_000])
@pytest.mark.parametrize("before", [0, 3])
def test_headers_without_end_are_refused_behind_others_too(cut: int, before: int) -> None:
    reader, found = reader_of()
    sent = b"".join(LARGE % number + b"b" * 400 for number in range(before))
    sent += b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 5_000
    sent += b"\r\n\r\n" if cut == 5_000 else b""
    with pytest.raises(HeadersTooLarge):
        feed_all(reader, sent, cut)
    assert len(found) == before


def test_a_tunnel_is_not_followed() -> None:
    reader, found = reader_of()
    assert reader.feed(b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\nrest") is False
    assert [(one.method, one.keep_alive) for one in found] == [("CONNECT", False)]


def test_an_upgrade_is_declined_and_its_body_read() -> None:
    reader, found = reader_of()
    head = b"POST /a HTTP/1.1\r\nhost: h\r\nconnection: keep-alive, Upgrade\r\nupgrade: x\r\n"
    for _ in range(2):
        assert reader.feed(head + b"content-length: 3\r\n\r\nabc")
    assert [(one.path, one.body, one.keep_alive) for one in found] == [("/a", b"abc", True)] * 2
    assert not {b"upgrade"} & found[0].headers.keys()
    assert found[0].header(b"connection") == "keep-alive"


def get(*headers: bytes, method: bytes = b"POST", body: bytes = b"") -> bytes:
    lines = [method + b" / HTTP/1.1", b"host: h", *headers]
    return b"\r\n".join([*lines, b"", body])


def test_headers_of_one_name_are_joined() -> None:
    reader, found = reader_of()
    reader.feed(get(b"x-a: 1", b"X-A: 2", b"x-b: 3", method=b"GET"))
    assert (found[0].header(b"x-a"), found[0].header(b"x-b")) == ("1, 2", "3")
    assert found[0].header(b"x-c") is None


@pytest.mark.parametrize(
    "header", [b"host: h", b"content-length: 0", b"authorization: Bearer a", b"Host: other"]
)
def test_but_not_those_that_two_readers_might_take_differently(header: bytes) -> None:
    reader, found = reader_of()
    with pytest.raises(InvalidRequest):
        reader.feed(get(header, header, method=b"GET"))
    assert found == []


def test_as_many_headers_as_the_limit_and_no_more() -> None:
    reader, found = reader_of()
    lines = [b"x%d: 1" % number for number in range(5)]
    reader.feed(get(*lines[:4], method=b"GET"))
    assert len(found) == 1
    with pytest.raises(HeadersTooLarge):
        reader.feed(get(*lines, method=b"GET"))


@pytest.mark.parametrize("size", [1_000, 1_001])
@pytest.mark.parametrize("chunked", [False, True])
def test_as_long_a_body_as_the_limit_and_no_longer(size: int, chunked: bool) -> None:
    reader, found = reader_of()
    if chunked:
        body = b"%x\r\n" % size + b"b" * size + b"\r\n0\r\n\r\n"
        sent = get(b"transfer-encoding: chunked", body=body)
    else:
        sent = get(b"content-length: %d" % size, body=b"b" * size)
    if size > LIMITS.max_body_bytes:
        with pytest.raises(TooLarge):
            reader.feed(sent)
    else:
        reader.feed(sent)
    assert [len(one.body) for one in found] == [1_000] * (size == 1_000)


def test_a_length_and_chunks_together_are_refused() -> None:
    reader, found = reader_of()
    with pytest.raises(InvalidRequest):
        reader.feed(get(b"content-length: 3", b"transfer-encoding: chunked", body=b"0\r\n\r\n"))
    assert found == []
