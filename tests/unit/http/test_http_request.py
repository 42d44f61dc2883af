"""Tests of RequestReader: targets, limits per request, framing."""

from __future__ import annotations

import pytest

from dynamo.communication.http.errors import HeadersTooLarge
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import Request, RequestReader, split_target
from dynamo.core.errors import InvalidRequest, TooLarge


@pytest.mark.parametrize(
    ("target", "expected"),
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
def test_path_and_query_of_a_target(target: str, expected: tuple[str, str]) -> None:
    assert split_target(target) == expected


LIMITS = HttpLimits(max_header_bytes=300, max_headers=5, max_body_bytes=1000)
LARGE = b"POST /%d HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 200 + b"\r\ncontent-length: 400\r\n\r\n"


def reader_of(limits: HttpLimits = LIMITS) -> tuple[RequestReader, list[Request]]:
    requests: list[Request] = []
    return RequestReader(limits, requests.append, lambda: None), requests


def feed_all(reader: RequestReader, sent: bytes, cut: int) -> None:
    for start in range(0, len(sent), cut):
        assert reader.feed(sent[start : start + cut])


@pytest.mark.parametrize("cut", [1, 7, 250, 631, 5_000, 1 << 20])
def test_bytes_are_counted_per_request(cut: int) -> None:
    reader, requests = reader_of()
    sent = b"".join(LARGE % number + b"b" * 400 for number in range(10, 30))
    feed_all(reader, sent, cut)
    assert [request.path for request in requests] == [f"/{number}" for number in range(10, 30)]
    assert {bytes(request.body) for request in requests} == {b"b" * 400}
    assert (reader.stage, reader.messages_started) == ("idle", 20)


@pytest.mark.parametrize("cut", [1, 50, 5_000])
@pytest.mark.parametrize("before", [0, 3])
def test_endless_headers_are_refused_also_after_other_requests(cut: int, before: int) -> None:
    reader, requests = reader_of()
    sent = b"".join(LARGE % number + b"b" * 400 for number in range(before))
    sent += b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 5_000
    sent += b"\r\n\r\n" if cut == 5_000 else b""
    with pytest.raises(HeadersTooLarge):
        feed_all(reader, sent, cut)
    assert len(requests) == before


def test_no_request_follows_a_tunnel() -> None:
    reader, requests = reader_of()
    assert reader.feed(b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\nrest") is False
    assert [(request.method, request.keep_alive) for request in requests] == [("CONNECT", False)]


def test_an_upgrade_is_ignored_and_its_body_is_read() -> None:
    reader, requests = reader_of()
    head = b"POST /a HTTP/1.1\r\nhost: h\r\nconnection: keep-alive, Upgrade\r\nupgrade: x\r\n"
    for _ in range(2):
        assert reader.feed(head + b"content-length: 3\r\n\r\nabc")
    assert [(request.path, request.body, request.keep_alive) for request in requests] == [
        ("/a", b"abc", True)
    ] * 2
    assert not {b"upgrade"} & requests[0].headers.keys()
    assert requests[0].header(b"connection") == "keep-alive"


def get(*headers: bytes, method: bytes = b"POST", body: bytes = b"") -> bytes:
    lines = [method + b" / HTTP/1.1", b"host: h", *headers]
    return b"\r\n".join([*lines, b"", body])


def test_headers_of_one_name_are_joined() -> None:
    reader, requests = reader_of()
    reader.feed(get(b"x-a: 1", b"X-A: 2", b"x-b: 3", method=b"GET"))
    assert (requests[0].header(b"x-a"), requests[0].header(b"x-b")) == ("1, 2", "3")
    assert requests[0].header(b"x-c") is None


@pytest.mark.parametrize(
    "header", [b"host: h", b"content-length: 0", b"authorization: Bearer a", b"Host: other"]
)
def test_repeated_framing_headers_are_refused(header: bytes) -> None:
    reader, requests = reader_of()
    with pytest.raises(InvalidRequest):
        reader.feed(get(header, header, method=b"GET"))
    assert requests == []


def test_the_number_of_headers_is_limited() -> None:
    reader, requests = reader_of()
    lines = [b"x%d: 1" % number for number in range(5)]
    reader.feed(get(*lines[:4], method=b"GET"))
    assert len(requests) == 1
    with pytest.raises(HeadersTooLarge):
        reader.feed(get(*lines, method=b"GET"))


def test_too_many_headers_are_refused_before_they_are_complete() -> None:
    reader, _ = reader_of()
    with pytest.raises(HeadersTooLarge):
        reader.feed(b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 8)
    assert len(reader.failed_request().headers) <= LIMITS.max_headers


@pytest.mark.parametrize("size", [1_000, 1_001])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_size_of_a_body_is_limited(size: int, chunked: bool) -> None:
    reader, requests = reader_of()
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
    assert [len(request.body) for request in requests] == [1_000] * (size == 1_000)


def test_content_length_with_chunked_is_refused() -> None:
    reader, requests = reader_of()
    with pytest.raises(InvalidRequest):
        reader.feed(get(b"content-length: 3", b"transfer-encoding: chunked", body=b"0\r\n\r\n"))
    assert requests == []


@pytest.mark.parametrize("ends", [False, True])
def test_endless_trailers_are_refused(ends: bool) -> None:
    reader, requests = reader_of()
    head = get(b"transfer-encoding: chunked", body=b"1\r\nb\r\n0\r\n")
    with pytest.raises(HeadersTooLarge):
        feed_all(reader, head + b"t: " + (b"y\r\nt: y" if ends else b"yyyyyyyy") * 1_000, 100)
    assert requests == []


def test_a_request_is_checked_before_its_body() -> None:
    checked: list[Request] = []

    def refuse(request: Request) -> None:
        checked.append(request)
        raise InvalidRequest("no")

    reader = RequestReader(LIMITS, checked.append, lambda: None, refuse)
    with pytest.raises(InvalidRequest, match="no"):
        reader.feed(get(b"content-length: 5", b"x-a: 1"))
    assert [(request.method, request.path, request.body) for request in checked] == [
        ("POST", "/", b"")
    ]
    assert reader.failed_request() is checked[0]


def test_the_head_of_a_malformed_request_is_known_in_part() -> None:
    reader, _ = reader_of()
    assert (reader.failed_request().method, reader.failed_request().path) == ("-", "")
    with pytest.raises(InvalidRequest):
        reader.feed(get(b"X-A: 1", b"x-b: 2", b"wrong"))
    failed = reader.failed_request()
    assert (failed.method, failed.path) == ("-", "/")
    assert failed.header(b"x-a") == "1"


def test_sizes_of_chunks_are_no_trailers() -> None:
    reader, requests = reader_of()
    reader.feed(get(b"transfer-encoding: chunked"))
    for _ in range(900):
        reader.feed(b"1\r\n")
        reader.feed(b"b\r\n")
    reader.feed(b"0\r\n\r\n")
    assert [len(request.body) for request in requests] == [900]


@pytest.mark.parametrize("sizes", [(90_000, 80_000), (80_000, 90_000)])
def test_a_large_body_may_follow_another(sizes: tuple[int, int]) -> None:
    reader, requests = reader_of(HttpLimits())
    for size in sizes:
        reader.feed(get(b"content-length: %d" % size, body=b"b" * 50_000))
        reader.feed(b"b" * 1)
        reader.feed(b"b" * (size - 50_001))
    assert [len(request.body) for request in requests] == list(sizes)
