#!/usr/bin/env python3
"""Compare the record of a deployment with what its clients counted.

    benchmarks/record_truth.py --model MODEL_DIR [--requests 10000] [--port 18940]

Mock workers serve with mode kv behind two frontends that take few requests at once. Every eighth
client leaves after the first bytes of its answer, and a worker is killed three times. Each request
must have one line: those that were refused, left and moved, too. No line may have a word of a prompt
or of a header.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SECRET = "xylophonequartz"
AT_ONCE = 48
LIMITS = {
    "DYNAMO_SERVER__MAX_CONCURRENT_REQUESTS": "16",
    "DYNAMO_SERVER__MAX_WAITING_REQUESTS": "4",
}


def start(arguments: argparse.Namespace, state: str) -> subprocess.Popen[bytes]:
    """Start the deployment."""
    command = [sys.executable, "-m", "dynamo", "run", "out=mock", "--model-path", arguments.model]
    flags = ["--workers", "3", "--http-workers", "2", "--router-mode", "kv"]
    environment = {**os.environ, **LIMITS, "XDG_RUNTIME_DIR": state}
    flags += ["--timing", "constant:0.01,2", "--http-port", str(arguments.port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, *flags], env=environment, **quiet)


async def ask(port: int, number: int, counts: Counter[str]) -> None:
    """Send a request, and count how it ended for this client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = f"{SECRET} {number % 40} tell me more about it " * 12 + str(number)
    message = {"model": "default", "messages": [{"role": "user", "content": text}]}
    body = json.dumps({**message, "stream": True, "max_tokens": 2 + number % 30}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-session-id: {SECRET}{number % 9}\r\n"
    )
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    try:
        answer = await reader.read(64)
        while number % 8 and (part := await reader.read(1 << 16)):
            answer += part
            if answer.endswith(b"0\r\n\r\n") or b" 503 " in answer[:20]:
                break
        if b" 200 " not in answer[:20]:
            counts["refused"] += 1
        elif not number % 8:
            counts["left"] += 1
        else:
            counts["failed" if b'"error":' in answer else "answered"] += 1
    finally:
        counts["sent"] += 1
        writer.close()


async def wait_until_served(port: int) -> None:
    """Wait until a request is answered."""
    while True:
        probe: Counter[str] = Counter()
        with contextlib.suppress(OSError):
            await ask(port, 1, probe)
        if probe["answered"]:
            return
        await asyncio.sleep(0.3)


def kill_worker(state: str) -> None:
    """Kill a worker."""
    for path in Path(state).glob("dynamo/*/processes/worker-*.json"):
        with contextlib.suppress(ProcessLookupError):  # the record of one that was killed before
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
            return


async def load(arguments: argparse.Namespace, state: str) -> Counter[str]:
    """Send all requests."""
    counts: Counter[str] = Counter()
    numbers = iter(range(1, arguments.requests + 1))
    kills = [arguments.requests * part // 4 for part in (1, 2, 3)]

    async def client() -> None:
        for number in numbers:
            if number in kills:
                kill_worker(state)
            await ask(arguments.port, number, counts)
            if number % 5 == 0:
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client())
    return counts


def main(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as state:
        deployment = start(arguments, state)
        try:
            asyncio.run(wait_until_served(arguments.port))
            asyncio.run(asyncio.sleep(2))
            before = sum(len(path.read_bytes().splitlines()) for path in files(state))
            counts = asyncio.run(load(arguments, state))
        finally:
            deployment.send_signal(signal.SIGTERM)
            deployment.wait()
        lines = [line for path in files(state) for line in path.read_bytes().splitlines()]
        rows = [json.loads(line) for line in lines]
        rows.sort(key=lambda row: row["timestamp"])
        rows = rows[before:]
        ends = Counter(row.get("end", "") or "complete" for row in rows)
        print("clients", dict(counts))
        print("record ", len(rows), dict(ends), "moved", sum("moves" in row for row in rows))
        planted = [line for line in lines if SECRET.encode() in line]
        print(f"lines with planted words: {len(planted)}")
        return 0 if len(rows) == counts["sent"] and not planted else 1


def files(state: str) -> list[Path]:
    """Return the files of the record."""
    return sorted(Path(state).glob("dynamo/*/record/*.jsonl"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=18_940)
    sys.exit(main(parser.parse_args()))
