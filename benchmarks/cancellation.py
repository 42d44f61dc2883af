#!/usr/bin/env python3
"""Measure the time from a client's disconnect until the engine is free again.

    benchmarks/cancellation.py [--model MODEL_DIR] [--rounds 40]

Clients disconnect in the middle of a stream, before the first token (during prefill), and while they
wait for the batch. The worker's /metrics are polled over one connection until no request runs or
waits and no block is in use. A poll takes under a millisecond. All KV blocks must be free at the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import sys
import time

from servers import Server, start_ours

BUSY = (
    "dynamo_worker_running_requests",
    "dynamo_worker_waiting_requests",
    "dynamo_worker_active_blocks",
)


class WorkerMetrics:
    """Reads the metrics of a worker."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)

    def busy(self) -> list[int]:
        """Return the numbers of running requests, waiting requests and blocks in use."""
        self._connection.request("GET", "/metrics")
        text = self._connection.getresponse().read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return [int(float(values[name])) for name in BUSY]

    def wait_until(self, nonzero: list[bool], timeout_s: float = 10.0) -> float:
        """Wait until each number of `busy` is non-zero as given, and return the time."""
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            if [bool(value) for value in self.busy()] == nonzero:
                return time.perf_counter()
        sys.exit(f"the worker never came to {nonzero}: {self.busy()}")


def open_stream(port: int, words: int, number: int) -> socket.socket:
    """Open a stream with a prompt of `words` words."""
    content = f"{number} " + "word " * words
    body = json.dumps(
        {"model": "smol", "messages": [{"role": "user", "content": content}], "max_tokens": 500,
         "stream": True, "ignore_eos": True}
    ).encode()  # fmt: skip
    sock = socket.create_connection(("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return sock


def rounds(server: Server, worker: WorkerMetrics, case: str, count: int) -> list[float]:
    """Return the milliseconds from disconnect to a free engine for each round."""
    port = int(server.url.rsplit(":", 1)[1])
    times_ms = []
    for number in range(count):
        if case == "mid-stream":
            sock = open_stream(port, 20, number)
            received = b""
            while received.count(b"data:") < 4:
                received += sock.recv(65536)
            others = []
        elif case == "prefill":
            sock = open_stream(port, 600, number)
            worker.wait_until([True, False, True])
            others = []
        else:
            others = [open_stream(port, 20, -1)]
            worker.wait_until([True, False, True])
            sock = open_stream(port, 20, number)
            worker.wait_until([True, True, True])
        closed = time.perf_counter()
        sock.close()
        times_ms.append((worker.wait_until([bool(others), False, bool(others)]) - closed) * 1e3)
        for other in others:
            other.close()
        worker.wait_until([False, False, False])
    return times_ms


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    more = ("--timing", "constant:0.5,23", "--max-num-seqs", "1")
    server = start_ours(args.model, 1, 1, "round_robin", *more)
    try:
        listed = subprocess.run(
            [sys.executable, "-m", "dynamo", "ps", "--json"], capture_output=True, check=True
        ).stdout
        url = next(
            process["status_url"]
            for process in json.loads(listed)
            if process["pid"] in server.workers
        )
        worker = WorkerMetrics(url)
        for case in ("mid-stream", "prefill", "waiting"):
            times_ms = sorted(rounds(server, worker, case, args.rounds))
            p99 = times_ms[min(len(times_ms) - 1, int(0.99 * len(times_ms)))]
            median = times_ms[len(times_ms) // 2]
            print(
                f"{case}: freed after p50 {median:.1f} ms, p99 {p99:.1f} ms ({len(times_ms)} rounds)"
            )
    finally:
        server.stop()


if __name__ == "__main__":
    main()
