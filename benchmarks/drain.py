#!/usr/bin/env python3
"""Take the only worker of running streams out of service, and measure the pause that clients see.

    benchmarks/drain.py [--engine native|mock] [--streams 16] [--prompt 1500] [--tokens 160]

A worker answers all streams undisturbed, and twice again. Each time another worker is added while it does. The
first time the old worker is then drained (`dynamo drain`), so that the streams take their KV blocks along. The
second time it is killed with SIGKILL, so that the other worker computes prompts and answers again. Every text
is compared with the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import uvloop
from load import vocabulary
from processes import deployment_of, ready, wait_ready
from servers import Server, start_ours
from streams import Stream, StreamClient, difference, now, percentiles_ms
from targets import Targets

WAYS = ("drain", "kill")
MAX_RATIO = 0.2
TIMEOUT_S = 3600


async def run_streams(client: StreamClient, requests: list[bytes]) -> list[Stream]:
    """Send all requests at once and return their streams."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.send(*pair)) for pair in enumerate(requests)]
    return [task.result() for task in tasks]


async def leave(server: Server, way: str, client: StreamClient, streams: int) -> float:
    """Add a worker when all streams have text, let the first one leave, and return the time."""
    while sum(bool(stream.times) for stream in client.live) < streams:
        await asyncio.sleep(0.05)
    deployment = deployment_of(server)
    (first,) = ready(deployment, "worker")
    port = server.url.rpartition(":")[2]
    dynamo = (sys.executable, "-m", "dynamo")
    scale = (*dynamo, "scale", "worker=2", "--deployment", port)
    await asyncio.to_thread(subprocess.run, scale, check=True, stdout=subprocess.DEVNULL)
    left_s = now()
    if way == "kill":
        os.kill(first.pid, signal.SIGKILL)
    else:
        drain = (*dynamo, "drain", first.name, "--deployment", port)
        await asyncio.to_thread(subprocess.run, drain, check=True, stdout=subprocess.DEVNULL)
    return left_s


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Run the streams undisturbed and in both ways. Return pauses and differences by way."""
    client = StreamClient(server.url, vocabulary(args.model), hung_s=TIMEOUT_S)
    requests = [client.encode_request(key, args.prompt, args.tokens) for key in range(args.streams)]
    whole = await run_streams(client, requests)
    result = {}
    for way in WAYS:
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(leave(server, way, client, args.streams))
            again = group.create_task(run_streams(client, requests))
        streams, left_s = again.result(), leaving.result()
        moved = [stream for stream in streams if stream.times and stream.times[-1] > left_s]
        pauses = [stream.longest_gap(left_s, now()) for stream in moved]
        result[way] = {
            "moved": len(moved),
            "errors": sorted({stream.error for stream in streams if stream.error}),
            "failed": sum(not stream.is_complete(args.tokens) for stream in streams),
            "changed": sum(
                any(difference(before.pieces, after.pieces).values())
                for before, after in zip(whole, streams, strict=True)
            ),
            "pause_ms": percentiles_ms(pauses),
        }
        print(way, result[way], flush=True)
    return result


def main() -> None:
    """Measure both ways and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--engine", default="native", choices=("native", "mock"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1500, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    more = ["--timing", "constant:2,30"] if args.engine == "mock" else []
    more += ["--request-timeout", str(TIMEOUT_S)]
    server = start_ours(args.model, 1, 1, "round_robin", *more, engine=args.engine)
    try:
        wait_ready(deployment_of(server), "worker", 1)
        result = uvloop.run(measure(server, args))
    finally:
        server.stop()
    targets = Targets()
    for way in WAYS:
        targets.at_most(f"failed, {way}", result[way]["failed"], 0)
        targets.at_most(f"other text, {way}", result[way]["changed"], 0)
    drained, killed = (result[way]["pause_ms"]["p99"] for way in WAYS)
    targets.at_most("pause p99, drain / kill", round(drained / killed, 3), MAX_RATIO)
    targets.print_report(result, f"{args.streams} streams of {args.prompt} words, {args.engine}")


if __name__ == "__main__":
    main()
