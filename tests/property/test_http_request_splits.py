"""Properties of RequestReader: any split of the bytes gives the same requests."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dynamo.communication.http.errors import HeadersTooLarge
from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import Request, RequestReader

METHODS = st.sampled_from(["GET", "POST", "PUT"])
PATHS = st.text("abc/%20?=&", max_size=20).map(lambda text: "/" + text)
VALUES = st.text("xyz ,;=é", max_size=30)
BODIES = st.binary(max_size=200)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, str, bytes]:
    """Draw a request as bytes, with its method and body."""
    method, body = draw(METHODS), draw(BODIES)
    head = f"{method} {draw(PATHS)} HTTP/1.1\r\nHost: a\r\nX-Some: {draw(VALUES)}\r\n"
    if draw(st.booleans()):
        sizes = draw(st.integers(1, 50))
        parts = [body[start : start + sizes] for start in range(0, len(body), sizes)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        return (
            head.encode("latin-1")
            + (b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"),
            method,
            body,
        )
    return (
        head.encode("latin-1") + b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        method,
        body,
    )


def read(data: bytes, cuts: list[int]) -> list[tuple[object, ...]]:
    """Return the fields of the requests in `data`, fed in pieces cut at `cuts`."""
    parsed: list[Request] = []
    reader = RequestReader(HttpLimits(), parsed.append, lambda: None)
    edges = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        assert reader.feed(data[start:end])
    assert reader.stage == "idle"
    return [
        (request.method, request.path, request.query, dict(request.headers), request.body)
        for request in parsed
    ]


@given(st.lists(requests(), min_size=1, max_size=4), st.data())
def test_any_split_gives_the_same_requests(
    sent: list[tuple[bytes, str, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(request[0] for request in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=30))
    whole = read(stream, [])
    assert [(request[0], request[4]) for request in whole] == [
        (method, body) for _, method, body in sent
    ]
    assert read(stream, cuts) == whole


def test_a_request_after_a_large_body_has_no_large_headers() -> None:
    body = b"x" * 200_000
    large = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    small = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n"
    parsed = read(large + small + large + small, [65_536, len(large) + 9, 2 * len(large)])
    assert [request[0] for request in parsed] == ["POST", "GET", "POST", "GET"]


@given(st.integers(1, 60_000))
def test_large_headers_after_a_body_are_refused(cut: int) -> None:
    first = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n" + b"x" * 9
    data = first + b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 50_000
    parsed: list[Request] = []
    reader = RequestReader(HttpLimits(), parsed.append, lambda: None)
    refused = False
    for part in (data[:cut], data[cut:], b"y" * 50_000):
        try:
            reader.feed(part)
        except HeadersTooLarge:
            refused = True
            break
    assert refused
    assert len(parsed) == 1
