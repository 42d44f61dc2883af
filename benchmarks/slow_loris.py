#!/usr/bin/env python3
"""Measure what slow connections cost: when each is dropped, and the latency of other clients.

    benchmarks/slow_loris.py [--model MODEL_DIR] [--connections 200] [--seconds 40]

Each seventh of the connections sends one of these, a byte per second: nothing, a header, a path, line
ends, a body, a chunk's extension, a trailer. Another client requests 4 tokens 20 times a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import selectors
import socket
import statistics
import time

from load import rss_mb
from servers import start_ours

POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
KINDS: dict[str, tuple[bytes, bytes]] = {
    "silence": (b"", b""),
    "header": (POST + b"x: ", b"y"),
    "path": (b"GET /", b"x"),
    "line ends": (b"", b"\r\n"),
    "body": (POST + b"content-length: 100000\r\n\r\n", b" "),
    "extension": (POST + b"transfer-encoding: chunked\r\n\r\n5;", b"x"),
    "trailer": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nz: ", b"x"),
}
BODY = json.dumps(
    {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
)


def send_requests(port: int, seconds: float, drip: object = None) -> list[float]:
    """Return the milliseconds of each request; `drip` is called between requests."""
    times_ms, end = [], time.perf_counter() + seconds
    client = http.client.HTTPConnection("127.0.0.1", port)
    while (now := time.perf_counter()) < end:
        client.request("POST", "/v1/chat/completions", BODY)
        answer = client.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        times_ms.append((time.perf_counter() - now) * 1e3)
        if callable(drip):
            drip()
        time.sleep(max(0.0, 0.05 - (time.perf_counter() - now)))
    client.close()
    return times_ms


class SlowConnections:
    """All slow connections. `dropped` holds the seconds until each was closed, by kind."""

    def __init__(self, port: int, count: int) -> None:
        self.dropped: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._selector = selectors.DefaultSelector()
        self._began = self._dripped = time.perf_counter()
        names = list(KINDS)
        for number in range(count):
            kind = names[number % len(names)]
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(KINDS[kind][0])
            self._selector.register(sock, selectors.EVENT_READ, kind)

    @property
    def connected(self) -> int:
        """Number of open connections."""
        return len(self._selector.get_map())

    def drip(self) -> None:
        """Record dropped connections. Sends a byte on each open one once a second."""
        now = time.perf_counter()
        for key, _ in self._selector.select(0):
            self._read(key, now)
        if now - self._dripped < 1:
            return
        self._dripped = now
        for key in list(self._selector.get_map().values()):
            try:
                key.fileobj.send(KINDS[key.data][1])  # type: ignore[union-attr]
            except OSError:
                self._end(key, now)

    def _read(self, key: selectors.SelectorKey, now: float) -> None:
        try:
            if key.fileobj.recv(4096):  # type: ignore[union-attr]
                return  # an error response; the end follows
        except OSError:
            pass
        self._end(key, now)

    def _end(self, key: selectors.SelectorKey, now: float) -> None:
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
        self.dropped[key.data].append(now - self._began)


def print_latencies(name: str, times_ms: list[float]) -> None:
    """Print the latencies of the other client as a line."""
    p99 = statistics.quantiles(times_ms, n=100)[98]
    print(
        f"{name:24} {len(times_ms)} requests, p50 {statistics.median(times_ms):.1f} ms, p99 {p99:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40)
    options = parser.parse_args()
    server = start_ours(options.model, 1, 1000, "round_robin")
    try:
        port = int(server.url.rpartition(":")[2])
        send_requests(port, 2)
        print_latencies("alone", send_requests(port, 10))
        before = sum(map(rss_mb, server.frontend))
        connections = SlowConnections(port, options.connections)
        print_latencies("beside them", send_requests(port, options.seconds, connections.drip))
        grown = sum(map(rss_mb, server.frontend)) - before
    finally:
        server.stop()
    for kind, times in connections.dropped.items():
        print(f"{kind:24} {len(times)} dropped, after {min(times, default=0):.1f} to "
              f"{max(times, default=0):.1f} s")  # fmt: skip
    print(f"still connected {connections.connected}, frontend + {grown:.1f} MB")


if __name__ == "__main__":
    main()
