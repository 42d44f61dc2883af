#!/usr/bin/env python3
"""From a client that hangs up to an engine that is free again: mid-stream, before the first token
(the prompt is being computed), and while waiting for a place in the batch.

    benchmarks/cancellation.py [--model MODEL_DIR] [--rounds 40]

The worker's /metrics are read over a kept connection until no request runs or waits and no block is
in use; a look takes under a millisecond. KV blocks must all be back at the end.
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


class Worker:
    """Its metrics."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)

    def busy(self) -> list[int]:
        """Requests that run, that wait, blocks in use."""
        self._connection.request("GET", "/metrics")
        text = self._connection.getresponse().read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return [int(float(values[name])) for name in BUSY]

    def until(self, wanted: list[bool], timeout_s: float = 10.0) -> float:
        """When each of `busy` was (not) zero, as wanted."""
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            if [bool(value) for value in self.busy()] == wanted:
                return time.perf_counter()
        sys.exit(f"the worker never came to {wanted}: {self.busy()}")


def ask(port: int, words: int, number: int) -> socket.socket:
    """Open a stream."""
    content = f"{number} " + "word " * words
    body = json.dumps(
        {"model": "smol", "messages": [{"role": "user", "content": content}], "max_tokens": 500,
         "stream": True, "ignore_eos": True}
    ).encode()  # fmt: skip
    sock = socket.create_connection(("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return sock


def rounds(server: Server, worker: Worker, case: str, count: int) -> list[float]:
    """Milliseconds from hanging up to free, each round."""
    port = int(server.url.rsplit(":", 1)[1])
    took = []
    for number in range(count):
        if case == "mid-stream":
            sock = ask(port, 20, number)
            seen = b""
            while seen.count(b"data:") < 4:
                seen += sock.recv(65536)
            others = []
        elif case == "prefill":
            sock = ask(port, 600, number)
            worker.until([True, False, True])
            others = []
        else:
            others = [ask(port, 20, -1)]
            worker.until([True, False, True])
            sock = ask(port, 20, number)
            worker.until([True, True, True])
        left = time.perf_counter()
        sock.close()
        took.append((worker.until([bool(others), False, bool(others)]) - left) * 1e3)
        for other in others:
            other.close()
        worker.until([False, False, False])
    return took


def main() -> None:
    """Print one line a case."""
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
        url = next(one["status_url"] for one in json.loads(listed) if one["pid"] in server.workers)
        worker = Worker(url)
        for case in ("mid-stream", "prefill", "waiting"):
            took = sorted(rounds(server, worker, case, args.rounds))
            p99 = took[min(len(took) - 1, int(0.99 * len(took)))]
            median = took[len(took) // 2]
            print(f"{case}: freed after p50 {median:.1f} ms, p99 {p99:.1f} ms ({len(took)} rounds)")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
