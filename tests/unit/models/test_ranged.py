"""Against a small HTTP server on loopback that breaks off as it is told."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads.resumable import fetch_resumable

CONTENT = bytes(range(256)) * 4000


class Server(HTTPServer):
    """Sends at most `most` bytes an answer; `ranges`: whether it knows them."""

    most = len(CONTENT)
    ranges = True
    status = 0
    asked: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        if self.server.status:
            self.send_error(self.server.status)
            return
        start = int(wanted.removeprefix("bytes=")[:-1]) if wanted and self.server.ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : start + self.server.most])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServerOnThread() as one:
        yield one


class HTTPServerOnThread(Server):
    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.url = f"http://127.0.0.1:{self.server_port}/a.whl"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


def test_broken_connections_are_taken_up_again(server, tmp_path):
    server.most = 300_000
    part, told = tmp_path / "part", []
    assert fetch_resumable(server.url, part, told.append)
    assert part.read_bytes() == CONTENT
    assert told[-1] == len(CONTENT)
    assert told == sorted(told)
    assert server.asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_stopped_download_goes_on_later(server, tmp_path):
    part = tmp_path / "part"

    def stop(done: int) -> None:
        raise ModelUnavailable("stopped")

    with pytest.raises(ModelUnavailable):
        fetch_resumable(server.url, part, stop)
    had = part.stat().st_size
    assert 0 < had < len(CONTENT)
    assert fetch_resumable(server.url, part, lambda _: None)
    assert part.read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={had}-"]
    assert fetch_resumable(server.url, part, lambda _: None)
    assert part.read_bytes() == CONTENT


def test_a_server_without_ranges_starts_anew(server, tmp_path):
    server.ranges = False
    part = tmp_path / "part"
    part.write_bytes(b"some of it")
    assert fetch_resumable(server.url, part, lambda _: None)
    assert part.read_bytes() == CONTENT


def test_it_gives_up_where_nothing_comes(server, tmp_path):
    server.most = 0
    assert not fetch_resumable(server.url, tmp_path / "part", lambda _: None)
    assert len(server.asked) == 1
    server.status = 401
    assert not fetch_resumable(server.url, tmp_path / "part", lambda _: None)
    assert not fetch_resumable("http://127.0.0.1:1/x.whl", tmp_path / "part", lambda _: None)
