"""A server with the part of the hub's API that its client needs to fetch public models."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.http_threads import serving

COMMIT = "c" * 40
CHUNK_BYTES = 1 << 16


class FakeHub(ThreadingHTTPServer):
    """Serves `repositories`: name -> file -> content, at one `commit`. `requests` are those that it
    got. The next answers of `cut` end after so many bytes; those of `busy` are 429 with these values
    of Retry-After; `damaged` files are other than the API tells. A `broken` server fails at all, one with a `token` refuses who has another.
    `rate`: bytes a second of each connection, 0: no limit."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[tuple[str, str, str]] = []
        self.cut: dict[str, int] = {}
        self.busy: list[str] = []
        self.damaged: dict[str, bytes] = {}
        self.broken = self.gated = False
        self.token, self.commit = "", COMMIT
        self.sent_bytes = self.rate = 0
        self.lock = threading.Lock()

    def handle_error(self, *_: Any) -> None:
        """Write nothing about clients that are gone."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()  # a small buffer: what is counted as sent has almost arrived
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def _answer(self) -> None:
        path, server = self.path.partition("?")[0], self.server
        span = self.headers.get("Range", "")
        with server.lock:
            server.requests.append((self.command, path, span))
            busy = server.busy.pop() if server.busy else None
        if busy is not None:
            self._send(429, b"{}", {"Retry-After": busy})
            return
        if server.broken:
            self._send(500, b"{}")
            return
        if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"} if server.gated else {})
            return
        for name, files in server.repositories.items():
            if path.startswith(f"/api/models/{name}/revision/"):
                self._send_api(name, files, path.rpartition("/")[2])
                return
            if path.startswith(f"/{name}/resolve/{server.commit}/"):
                file = path.removeprefix(f"/{name}/resolve/{server.commit}/")
                if file in files:
                    self._send_file(file, server.damaged.get(file, files[file]), span)
                else:
                    self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            if path.startswith(f"/{name}/resolve/"):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_api(self, name: str, files: dict[str, bytes], revision: str) -> None:
        if revision not in {"main", self.server.commit}:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [describe(file, data) for file, data in files.items()]
        info = {"id": name, "sha": self.server.commit, "siblings": siblings}
        self._send(200, json.dumps(info).encode())

    def _send_file(self, file: str, data: bytes, span: str) -> None:
        start, _, end = span.removeprefix("bytes=").partition("-")
        first, last = int(start or 0), min(int(end or len(data)), len(data) - 1)
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if span else {}
        with self.server.lock:
            limit = self.server.cut.pop(file, None)
        self._send(206 if span else 200, data[first : last + 1], headers, limit)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        limit: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = limit is not None
        for start in range(0, len(body[:limit]), CHUNK_BYTES):
            part = body[:limit][start : start + CHUNK_BYTES]
            try:
                self.wfile.write(part)
            except OSError:  # the client is gone
                self.close_connection = True
                return
            with self.server.lock:
                self.server.sent_bytes += len(part)
            if self.server.rate:
                time.sleep(len(part) / self.server.rate)


def describe(file: str, data: bytes) -> dict[str, Any]:
    """Return a file as the hub's API does. Weights have a SHA-256 there."""
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": oid}
    if file.endswith((".safetensors", ".gguf")):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return entry


@contextmanager
def running_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    """Serve until the block ends."""
    with serving(FakeHub(repositories)) as hub:
        yield hub
