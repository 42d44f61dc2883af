#!/usr/bin/env python3
"""Measure what a client that reads nothing for 10 s costs 256 other streams and the memory.

    benchmarks/slow_reader.py [--model MODEL_DIR] [--rounds 3]

The slow client sets SO_RCVBUF to 4 KiB, requests `--tokens` tokens (over 1 MB of events), reads nothing
for 10 s and then everything. Its text must be complete, or end with the error `slow_reader`.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from load import rss_mb
from servers import Server, start_ours

HERE = Path(__file__).parent


def slow_client(port: int, tokens: int, outcome: dict[str, Any]) -> None:
    """Send a request, sleep, and read everything."""
    body = json.dumps(
        {"model": "smol", "messages": [{"role": "user", "content": "count"}], "max_tokens": tokens,
         "stream": True, "stream_options": {"include_usage": True}}
    ).encode()  # fmt: skip
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    time.sleep(10)
    sock.settimeout(60)
    data = bytearray()
    try:
        while part := sock.recv(65536):
            data += part
    except OSError as error:
        outcome["socket_error"] = str(error)
    outcome["bytes"] = len(data)
    outcome["ended"] = (
        "slow_reader"
        if b"slow_reader" in data
        else "whole"
        if b"[DONE]" in data and f'"completion_tokens":{tokens}'.encode() in data
        else "cut"
    )


def one_run(server: Server, args: argparse.Namespace, seed: int, slow: bool) -> dict[str, Any]:
    """Run 256 streams with or without the slow client."""
    outcome: dict[str, Any] = {}
    before = sum(map(rss_mb, server.frontend))
    peak = before
    thread = threading.Thread(
        target=slow_client, args=(int(server.url.rsplit(":", 1)[1]), args.tokens, outcome)
    )
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            sys.executable,
            str(HERE / "load.py"),
            "--url",
            server.url,
            "--model",
            "smol",
            "--vocabulary",
            args.model,
        ]
        command += [
            "-c",
            "256",
            "--isl",
            "64",
            "--osl",
            "256",
            "--duration",
            "12",
            "--seed",
            str(seed),
            "--out",
            out.name,
        ]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(1)
        if slow:
            thread.start()
        while load.poll() is None:
            peak = max(peak, sum(map(rss_mb, server.frontend)))
            time.sleep(0.1)
        if slow:
            thread.join()
        result = json.loads(Path(out.name).read_text())
    return {
        "itl_p99_ms": result["itl_ms"]["p99"],
        "grown_mb": round(peak - before, 2),
        "errors": result["errors"],
        **outcome,
    }


def main() -> None:
    """Alternate runs without and with the slow client, and print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--speedup", type=float, default=8, help="of the mock workers")
    args = parser.parse_args()
    server = start_ours(args.model, 4, args.speedup, "round_robin")
    try:
        one_run(server, args, 0, slow=False)
        runs = [
            (one_run(server, args, i, slow=False), one_run(server, args, i, slow=True))
            for i in range(1, args.rounds + 1)
        ]
    finally:
        server.stop()
    for name, rows in (("without", [a for a, _ in runs]), ("with", [b for _, b in runs])):
        medians = {k: statistics.median(r[k] for r in rows) for k in ("itl_p99_ms", "grown_mb")}
        print(name, json.dumps(medians), json.dumps(rows))


if __name__ == "__main__":
    main()
