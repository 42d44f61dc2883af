"""A server with the part of the hub's API that its client needs to fetch public models."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40


class FakeHub(ThreadingHTTPServer):
    """Serves `repositories`: name -> file -> content. `requests` are those that it got. The answers
    of `cut` end after so many bytes of the file; a `broken` server refuses all."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[tuple[str, str, str]] = []
        self.cut: dict[str, int] = {}
        self.broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        span = self.headers.get("Range", "")
        self.server.requests.append((self.command, path, span))
        if self.server.broken:
            self._send(403, b"{}")
            return
        for name, files in self.server.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                self._send_api(name, files, is_tree="/tree/" in path)
                return
            if path.startswith(f"/{name}/resolve/"):
                file = path.removeprefix(f"/{name}/resolve/").partition("/")[2]
                self._send_file(file, files[file], span)
                return
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_api(self, name: str, files: dict[str, bytes], *, is_tree: bool) -> None:
        tree = [
            {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
            for file, data in files.items()
        ]
        siblings = [{"rfilename": file} for file in files]
        info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        self._send(200, json.dumps(tree if is_tree else info).encode())

    def _send_file(self, file: str, data: bytes, span: str) -> None:
        start = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        limit = self.server.cut.pop(file, None) if self.command == "GET" else None
        self._send(206 if start else 200, data[start:], headers, limit)

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
        if self.command == "GET":
            self.wfile.write(body[:limit])
        self.close_connection = limit is not None


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def running_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    """Serve until the block ends."""
    with FakeHub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
