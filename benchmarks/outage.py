#!/usr/bin/env python3
"""Remove etcd for minutes and return it empty, then remove NATS, while requests continue.

    benchmarks/outage.py [--etcd-away 300] [--nats-away 60] [--model DIR]

Runs real servers (the wheels of the test extra), a frontend, and two commands with a mock worker each.
Three clients send requests without pause.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from load import vocabulary
from servers import answers, free_port
from streams import Stream, StreamClient, now, percentiles_ms
from targets import Targets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.servers import EtcdProcess, NatsProcess

PROMPT, TOKENS, CLIENTS, WORKERS = 32, 16, 3, 2
AROUND_S, BACK_S = 3.0, 30.0


def registered_workers(etcd: EtcdProcess) -> int:
    """Return the number of registered workers."""
    low, high = b"/dynamo/workers/worker/generate/", b"/dynamo/workers/worker/generate0"
    body = {"key": base64.b64encode(low).decode(), "range_end": base64.b64encode(high).decode()}
    url = f"http://127.0.0.1:{etcd.port}/v3/kv/range"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=2) as answer:
        return int(json.loads(answer.read()).get("count", 0))


def missing_planes(url: str) -> set[str]:
    """Return the planes whose servers the frontend cannot reach."""
    with urllib.request.urlopen(url + "/health", timeout=2) as answer:
        return set(json.loads(answer.read())["planes"].get("away", ()))


async def wait_until(condition: Callable[[], bool]) -> float:
    """Wait for a condition. Returns the seconds that passed; infinite after BACK_S seconds."""
    started = now()
    while now() - started < BACK_S:
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(condition):
                return now() - started
        await asyncio.sleep(0.05)
    return float("inf")


@contextlib.contextmanager
def commands(
    args: argparse.Namespace, etcd: EtcdProcess, nats: NatsProcess, port: int
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Run a frontend and each worker as a separate command."""
    env = os.environ | {
        "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}", "DYNAMO_NATS_URL": nats.url,
    }  # fmt: skip
    model = [args.model] if args.model else []
    worker = ["in=none", "out=mock", *model, "--model-name", "smol", "--workers", "1"]
    started = []
    for words in (
        ["--workers", "0", "--http-port", str(port)],
        *([*worker, "--deployment", f"outage-{port}-{number}"] for number in range(WORKERS)),
    ):
        command = [sys.executable, "-m", "dynamo", "run", *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env=env, **quiet))
    try:
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(30)


async def outages(
    args: argparse.Namespace, etcd: EtcdProcess, nats: NatsProcess, url: str
) -> dict[str, Any]:
    """Stop and restart the servers while clients send requests, and return the result."""
    client, keys = StreamClient(url, vocabulary(args.model)), itertools.count()
    streams, over = list[Stream](), asyncio.Event()

    async def send_requests() -> None:
        while not over.is_set():
            key = next(keys)
            streams.append(await client.send(key, client.encode_request(key, PROMPT, TOKENS)))

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(send_requests())
        await asyncio.sleep(AROUND_S)
        await asyncio.to_thread(etcd.kill)
        await asyncio.sleep(args.etcd_away)
        await asyncio.to_thread(etcd.delete_data)
        await asyncio.to_thread(etcd.start)
        registered_s = await wait_until(lambda: registered_workers(etcd) == WORKERS)
        await asyncio.sleep(AROUND_S)
        await asyncio.to_thread(nats.kill)
        await asyncio.sleep(args.nats_away)
        await asyncio.to_thread(nats.start)
        in_use_s = await wait_until(lambda: not missing_planes(url))
        await asyncio.sleep(AROUND_S)
        over.set()
    errors = Counter(
        stream.error or "miscounted" for stream in streams if not stream.is_complete(TOKENS)
    )
    return {
        "requests": len(streams),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common(5)),
        "request_ms": percentiles_ms([stream.ended - stream.started for stream in streams]),
        "etcd_back_registered_s": round(registered_s, 2),
        "nats_back_in_use_s": round(in_use_s, 2),
    }


def main() -> None:
    """Start the deployment, run the outages and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--etcd-away", type=float, default=300, help="seconds")
    parser.add_argument("--nats-away", type=float, default=60, help="seconds")
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with EtcdProcess() as etcd, NatsProcess() as nats, commands(args, etcd, nats, port) as started:
        answers(url, "smol", started)
        end = now() + 30
        while registered_workers(etcd) < WORKERS and now() < end:
            time.sleep(0.1)
        result = uvloop.run(outages(args, etcd, nats, url))
        result["processes_ended"] = sum(process.poll() is not None for process in started)
    targets = Targets()
    targets.at_most("failed", result["failed"], 0)
    targets.at_most("commands that ended", result["processes_ended"], 0)
    targets.at_most("registered after etcd's return", result["etcd_back_registered_s"], 2, " s")
    targets.at_most("NATS in use after its return", result["nats_back_in_use_s"], 2, " s")
    targets.print_report(
        result, f"etcd away for {args.etcd_away:g} s, NATS for {args.nats_away:g} s"
    )


if __name__ == "__main__":
    main()
