"""One response by itself: how it is framed by method and version, and that it ends once."""

from __future__ import annotations

import pytest

from dynamo.communication.http.response import Response


class Wire:
    """A connection that keeps what it is to send."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.events: list[bytes] = []
        self.framed = True  # of the response before
        self.armed = 0

    def arm(self) -> None:
        self.armed += 1

    def join(self) -> None:
        body = b"".join(self.events)
        if body:
            self.out.append(b"%x\r\n%b\r\n" % (len(body), body) if self.framed else body)
        self.events.clear()

    def backlog(self) -> int:
        return 0

    @property
    def head(self) -> bytes:
        return self.out[0].lower()

    @property
    def body(self) -> bytes:
        return b"".join(self.out[1:])


def respond(
    method: str = "POST", version: str = "1.1", *, keep_alive: bool = True
) -> tuple[Wire, Response]:
    wire = Wire()
    made = Response(wire, method, version, keep_alive=keep_alive, backlog_limit=1 << 20)
    assert (made.status, made.started, made.open) == (0, False, True)
    return wire, made


def test_a_stream_is_chunked_and_ends_once() -> None:
    wire, response = respond()
    response.start(200)
    assert wire.armed == 1
    assert response.write(b"one")
    assert response.write(b"two")
    assert wire.armed == 2
    response.end(b"!")
    assert (response.ended, response.open, response.status) == (True, False, 200)
    sent = list(wire.out)
    response.end(b"again")
    assert not response.write(b"late")
    assert (wire.out, wire.events) == (sent, [])
    assert b"transfer-encoding: chunked" in wire.head
    assert wire.body == b"7\r\nonetwo!\r\n0\r\n\r\n"
    assert response.keep_alive


def test_for_an_older_client_a_stream_ends_with_its_connection() -> None:
    wire, response = respond(version="1.0")
    response.start(200)
    response.write(b"one")
    response.end()
    assert b"connection: close" in wire.head
    assert b"chunked" not in wire.head
    assert (wire.body, response.keep_alive) == (b"one", False)


def test_a_head_of_a_stream_has_no_body() -> None:
    wire, response = respond("HEAD")
    response.start(200)
    assert response.write(b"one")
    response.end(b"two")
    assert b"transfer-encoding: chunked" in wire.head
    assert (wire.body, wire.events, response.ended) == (b"", [], True)


@pytest.mark.parametrize(
    ("method", "status", "length", "body"),
    [
        ("GET", 200, b"content-length: 3\r\n", b"abc"),
        ("HEAD", 200, b"content-length: 3\r\n", b""),
        ("GET", 204, b"", b""),
    ],
)
def test_a_whole_response(method: str, status: int, length: bytes, body: bytes) -> None:
    wire, response = respond(method)
    response.send(status, (), b"" if status == 204 else b"abc")
    assert (b"content-length" in wire.head) is bool(length)
    assert length in wire.head
    assert (wire.body, response.ended, response.status) == (body, True, status)
    with pytest.raises(RuntimeError, match="started already"):
        response.send(500, (), b"")


@pytest.mark.parametrize(
    ("version", "keep_alive", "said"),
    [
        ("1.1", True, []),
        ("1.1", False, [b"connection: close"]),
        ("1.0", True, [b"connection: keep-alive"]),
        ("1.0", False, [b"connection: close"]),
    ],
)
def test_what_is_said_of_the_connection(version: str, keep_alive: bool, said: list[bytes]) -> None:
    wire, response = respond("GET", version, keep_alive=keep_alive)
    response.send(200, (), b"")
    assert [one for one in wire.head.split(b"\r\n") if one.startswith(b"connection:")] == said
