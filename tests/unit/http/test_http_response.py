"""Tests of one Response: its framing by method and version, and that it ends only once."""

from __future__ import annotations

import pytest

from dynamo.communication.http.response import Response


class RecordingConnection:
    """A ResponseConnection that keeps the bytes to send. `flushes` counts schedule_flush calls."""

    def __init__(self) -> None:
        self.output: list[bytes] = []
        self.pending_events: list[bytes] = []
        self.chunked = True  # left over from an earlier response
        self.flushes = 0

    def schedule_flush(self) -> None:
        self.flushes += 1

    def merge_events(self) -> None:
        body = b"".join(self.pending_events)
        if body:
            self.output.append(b"%x\r\n%b\r\n" % (len(body), body) if self.chunked else body)
        self.pending_events.clear()

    def unsent_bytes(self) -> int:
        return 0

    @property
    def head(self) -> bytes:
        return self.output[0].lower()

    @property
    def body(self) -> bytes:
        return b"".join(self.output[1:])


def new_response(
    method: str = "POST", version: str = "1.1", *, keep_alive: bool = True
) -> tuple[RecordingConnection, Response]:
    connection = RecordingConnection()
    response = Response(connection, method, version, keep_alive=keep_alive, backlog_limit=1 << 20)
    assert (response.status, response.started, response.open) == (0, False, True)
    return connection, response


def test_a_stream_is_chunked_and_ends_once() -> None:
    connection, response = new_response()
    response.start(200)
    assert connection.flushes == 1
    assert response.write(b"one")
    assert response.write(b"two")
    assert connection.flushes == 2
    response.end(b"!")
    assert (response.ended, response.open, response.status) == (True, False, 200)
    sent = list(connection.output)
    response.end(b"again")
    assert not response.write(b"late")
    assert (connection.output, connection.pending_events) == (sent, [])
    assert b"transfer-encoding: chunked" in connection.head
    assert connection.body == b"7\r\nonetwo!\r\n0\r\n\r\n"
    assert response.keep_alive


def test_an_http_1_0_stream_ends_with_its_connection() -> None:
    connection, response = new_response(version="1.0")
    response.start(200)
    response.write(b"one")
    response.end()
    assert b"connection: close" in connection.head
    assert b"chunked" not in connection.head
    assert (connection.body, response.keep_alive) == (b"one", False)


def test_a_streamed_response_to_head_has_no_body() -> None:
    connection, response = new_response("HEAD")
    response.start(200)
    assert response.write(b"one")
    response.end(b"two")
    assert b"transfer-encoding: chunked" in connection.head
    assert (connection.body, connection.pending_events, response.ended) == (b"", [], True)


@pytest.mark.parametrize(
    ("method", "status", "length", "body"),
    [
        ("GET", 200, b"content-length: 3\r\n", b"abc"),
        ("HEAD", 200, b"content-length: 3\r\n", b""),
        ("GET", 204, b"", b""),
    ],
)
def test_send_writes_a_whole_response(method: str, status: int, length: bytes, body: bytes) -> None:
    connection, response = new_response(method)
    response.send(status, (), b"" if status == 204 else b"abc")
    assert (b"content-length" in connection.head) is bool(length)
    assert length in connection.head
    assert (connection.body, response.ended, response.status) == (body, True, status)
    with pytest.raises(RuntimeError, match="started already"):
        response.send(500, (), b"")


@pytest.mark.parametrize(
    ("version", "keep_alive", "expected"),
    [
        ("1.1", True, []),
        ("1.1", False, [b"connection: close"]),
        ("1.0", True, [b"connection: keep-alive"]),
        ("1.0", False, [b"connection: close"]),
    ],
)
def test_connection_header(version: str, keep_alive: bool, expected: list[bytes]) -> None:
    connection, response = new_response("GET", version, keep_alive=keep_alive)
    response.send(200, (), b"")
    lines = connection.head.split(b"\r\n")
    assert [line for line in lines if line.startswith(b"connection:")] == expected
