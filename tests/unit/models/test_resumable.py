"""Resumable downloads from an HTTP server on loopback that breaks connections."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads.pip import fetch_resumable

CONTENT = bytes(range(256)) * 4000


class Server(HTTPServer):
    """Sends at most `max_bytes` per response. `ranges`: supports range requests."""

    max_bytes = len(CONTENT)
    ranges = True
    status = 0
    requested_ranges: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        self.server.requested_ranges.append(requested)
        if self.server.status:
            self.send_error(self.server.status)
            return
        start = (
            int(requested.removeprefix("bytes=")[:-1]) if requested and self.server.ranges else 0
        )
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : start + self.server.max_bytes])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServerOnThread() as running:
        yield running


class HTTPServerOnThread(Server):
    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested_ranges = []
        self.url = f"http://127.0.0.1:{self.server_port}/a.whl"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


def test_broken_connections_are_resumed(server, tmp_path):
    server.max_bytes = 300_000
    part, progress = tmp_path / "part", []
    assert fetch_resumable(server.url, part, progress.append)
    assert part.read_bytes() == CONTENT
    assert progress[-1] == len(CONTENT)
    assert progress == sorted(progress)
    assert server.requested_ranges == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_stopped_download_is_resumed(server, tmp_path):
    part = tmp_path / "part"

    def stop(done: int) -> None:
        raise ModelUnavailable("stopped")

    with pytest.raises(ModelUnavailable):
        fetch_resumable(server.url, part, stop)
    size = part.stat().st_size
    assert 0 < size < len(CONTENT)
    assert fetch_resumable(server.url, part, lambda _: None)
    assert part.read_bytes() == CONTENT
    assert server.requested_ranges == [None, f"bytes={size}-"]
    assert fetch_resumable(server.url, part, lambda _: None)
    assert part.read_bytes() == CONTENT


def test_a_server_without_ranges_restarts_the_file(server, tmp_path):
    server.ranges = False
    part = tmp_path / "part"
    part.write_bytes(b"some of it")
    assert fetch_resumable(server.url, part, lambda _: None)
    assert part.read_bytes() == CONTENT


def test_an_attempt_without_bytes_is_the_last(server, tmp_path):
    server.max_bytes = 0
    assert not fetch_resumable(server.url, tmp_path / "part", lambda _: None)
    assert len(server.requested_ranges) == 1
    server.status = 401
    assert not fetch_resumable(server.url, tmp_path / "part", lambda _: None)
    assert not fetch_resumable("http://127.0.0.1:1/x.whl", tmp_path / "part", lambda _: None)
