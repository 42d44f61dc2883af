"""Raw HTTP requests, streams of unconcerned clients and the memory of processes, for attacks."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.faults.cluster import Cluster
from tests.faults.stream_client import body_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class HttpAnswer:
    """A complete answer. `status` is 0 if the server closed the connection without one."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        return dict(json.loads(self.body)["error"])


def request_bytes(
    body: bytes | dict[str, Any] = b"",
    path: str = CHAT,
    *,
    method: str = "POST",
    headers: Sequence[str] = (),
    host: str = "127.0.0.1",
) -> bytes:
    """Return the bytes of an HTTP request. A dict is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    if data or method == "POST":
        if not any(line.lower().startswith("content-type:") for line in headers):
            lines.append("Content-Type: application/json")
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode() + data


def exchange(port: int, data: bytes, timeout_s: float = 20.0) -> HttpAnswer:
    """Send the bytes of one request on a connection of its own and read the whole answer."""
    started = time.monotonic()
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        with suppress(ConnectionError):  # the answer may come before the request is sent
            connection.sendall(data)
        with suppress(ConnectionError, TimeoutError):
            while not _is_complete(received) and (part := connection.recv(1 << 16)):
                received += part
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:])
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    status = int(lines[0].split()[1]) if received else 0
    return HttpAnswer(status, headers, body, time.monotonic() - started)


def _is_complete(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return body.endswith(b"0\r\n\r\n") or head.startswith(b"HTTP/1.1 204")


def chat(port: int, timeout_s: float = 20.0, **fields: Any) -> HttpAnswer:
    """Send a chat request of two tokens."""
    body = body_of(0, 2, 1) | {"stream": False, "stream_options": None} | fields
    return exchange(port, request_bytes(body), timeout_s)


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB; 0.0 if it is gone."""
    with suppress(OSError):
        return (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
        )
    return 0.0


@dataclass
class Bystanders:
    """The experience of unconcerned clients during an attack.

    `longest_gap_s` is the longest wait of four streams for their next bytes, `longest_live_s` that
    of `GET /live` every 10 ms. `growth_mb` is each process's peak memory above its memory at the
    start, by role and pid. `errors` holds failed requests and streams that ended early.
    """

    longest_gap_s: float = 0.0
    longest_live_s: float = 0.0
    growth_mb: dict[tuple[str, int], float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def worst_growth_mb(self) -> float:
        """The growth of the process that grew most."""
        return max(self.growth_mb.values(), default=0.0)


class _Watch:
    def __init__(self, cluster: Cluster, streams: int) -> None:
        self.result = Bystanders()
        self._cluster = cluster
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._stream, args=(key,)) for key in range(streams)
        ]
        self._threads += [
            threading.Thread(target=self._live),
            threading.Thread(target=self._memory),
        ]

    def start(self) -> Self:
        for thread in self._threads:
            thread.start()
        time.sleep(0.5)
        return self

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _stream(self, key: int) -> None:
        """Read one stream after another; the stream of the end is left."""
        data = request_bytes(body_of(key, 4000, 4))
        try:
            with socket.create_connection(("127.0.0.1", self._cluster.port), timeout=60) as stream:
                stream.sendall(data)
                last = 0.0
                while not self._stopping.is_set():
                    received = stream.recv(1 << 16)
                    now = time.monotonic()
                    if not received or b"[DONE]" in received or b'"error":' in received:
                        self.result.errors.append(f"stream {key} ended: {received[-200:]!r}")
                        return
                    gap = now - last if last else 0.0
                    self.result.longest_gap_s = max(self.result.longest_gap_s, gap)
                    last = now
        except OSError as error:
            self.result.errors.append(f"stream {key}: {error!r}")

    def _live(self) -> None:
        data = request_bytes(method="GET", path="/live")
        while not self._stopping.is_set():
            try:
                answer = exchange(self._cluster.port, data, 60)
            except OSError as error:
                self.result.errors.append(f"/live: {error!r}")
                continue
            if answer.status != 200:
                self.result.errors.append(f"/live: {answer.status}")
            self.result.longest_live_s = max(self.result.longest_live_s, answer.seconds)
            self._stopping.wait(0.01)

    def _memory(self) -> None:
        records = [*self._cluster.processes("frontend"), *self._cluster.processes("worker")]
        began = {(record.role, record.pid): rss_mb(record.pid) for record in records}
        while not self._stopping.is_set():
            for process, first in began.items():
                growth = rss_mb(process[1]) - first
                self.result.growth_mb[process] = max(growth, self.result.growth_mb.get(process, 0))
            self._stopping.wait(0.02)


@contextmanager
def bystanders(cluster: Cluster, streams: int = 4) -> Iterator[Bystanders]:
    """Watch unconcerned streams, /live and memory during the block. Read the result after it."""
    watch = _Watch(cluster, streams).start()
    try:
        yield watch.result
    finally:
        watch.stop()
