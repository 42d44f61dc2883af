#!/usr/bin/env python3
"""Serve several models on one port: does one disturb another, and do changes lose requests?

    benchmarks/several_models.py isolation [--seconds 20] [--long] [--model DIR]
    benchmarks/several_models.py index [--seconds 20] [--model DIR] [--workers 4] [--rounds 2]
        [--frontends 4] [--routers 2] [--shared-index] [--roles] [--tiers]
    benchmarks/several_models.py live [--changes 100] [--rate 200] [--frontends 4] [--campaigns 3]
        [--slots 64] [--model DIR]

`isolation`: model `a` is offered five times what its two mock workers compute, and they are killed
every 5 s; model `b` is offered half of what its own compute. The first token of `b` is compared with
`b` alone before. With `--long` the prompts for `a` have most of its context.

`index`: three models, with blocks of 16 and 32 tokens, get the same conversations, whose prompts
share beginnings. Hit ratios, first tokens, CPU and bytes of indexes are compared with those of three
deployments of one model each. These run at once, so that the machine is as busy. `--rounds`
alternates the two.

`live`: models are added and removed, aliases moved and workers scaled in random order, while requests come
at a fixed rate. A request may only fail under a name that was removed, with 404. At the end all is as
before. `--campaigns` follow each other: what a frontend grows in the first and not in later ones is no leak.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import Any

import uvloop
from live_models import live
from load import vocabulary
from own_index import SLOTS, STEP_MS, TOKENS, WORKERS, index, start
from processes import deployment_of, ready
from servers import Server
from streams import LoopLag, Stream, StreamClient, now, percentiles_ms

CAPACITY = WORKERS * SLOTS / (TOKENS * STEP_MS / 1e3)
"""Requests a second that the workers of a model compute."""
FLOOD, KILL_S = 5, 5.0
PROMPT, LONG_PROMPT = 30, 1500


class Load:
    """Sends requests to names in turn at a rate, until it is stopped."""

    def __init__(self, client: StreamClient, keys: itertools.count[int]) -> None:
        self._client, self._keys = client, keys
        self.streams: list[tuple[str, Stream]] = []

    async def run(
        self, names: Sequence[str], rate: float, seconds: float, prompt: int = PROMPT
    ) -> Sequence[Stream]:
        """Send requests for some seconds, and return their streams."""
        started, tasks = now(), list[asyncio.Task[Stream]]()
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, started + number / rate - now()))
                tasks.append(group.create_task(self._send(names[number % len(names)], prompt)))
        return [task.result() for task in tasks]

    async def _send(self, name: str, prompt: int) -> Stream:
        key = next(self._keys)
        request = self._client.encode_request(key, prompt, TOKENS, name)
        stream = await self._client.send(key, request)
        self.streams.append((name, stream))
        return stream


def health(url: str) -> int:
    """Return the status of /health."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def watch_health(url: str, statuses: Counter[int]) -> None:
    """Count the statuses of /health twice a second."""
    while True:
        statuses[await asyncio.to_thread(health, url)] += 1
        await asyncio.sleep(0.5)


async def kill_workers(server: Server, model: str) -> None:
    """Kill all workers of a model again and again."""
    deployment = deployment_of(server)
    while True:
        await asyncio.sleep(KILL_S)
        for process in ready(deployment, "worker"):
            if process.name.startswith(f"{model}-"):
                os.kill(process.pid, signal.SIGKILL)


async def isolation(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Return the times of `b` alone and beside the flood of `a`."""
    load = Load(StreamClient(server.url, vocabulary(args.model)), itertools.count())
    report: dict[str, Any] = {"capacity_requests_s": CAPACITY}
    statuses = Counter[int]()
    async with LoopLag() as lag:
        alone = await load.run(["b"], CAPACITY / 2, args.seconds)
        side = [
            asyncio.create_task(watch_health(server.url, statuses)),
            asyncio.create_task(kill_workers(server, "a")),
        ]
        prompt = LONG_PROMPT if args.long else PROMPT
        flood = asyncio.create_task(load.run(["a"], FLOOD * CAPACITY, args.seconds, prompt))
        beside = await load.run(["b"], CAPACITY / 2, args.seconds)
        for task in side:
            task.cancel()
        flooded = await flood
    for name, streams in (("b alone", alone), ("b beside a", beside), ("a", flooded)):
        answered = [stream for stream in streams if stream.is_complete(TOKENS)]
        report[name] = {
            "ttft_ms": percentiles_ms([stream.first_s for stream in answered]),
            "failed": Counter(s.error[:60] for s in streams if not s.is_complete(TOKENS)),
        }
    before, after = report["b alone"]["ttft_ms"]["p99"], report["b beside a"]["ttft_ms"]["p99"]
    report["client_lag_ms"] = lag.percentiles()
    report["health"] = statuses
    report["holds"] = (
        after <= 1.1 * before + 5 and not report["b beside a"]["failed"] and list(statuses) == [200]
    )
    return report


PARTS = {"isolation": isolation, "live": live}


def main() -> None:
    """Run one part, and print its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=(*PARTS, "index"))
    parser.add_argument("--model", default="")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--campaigns", type=int, default=3)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--slots", type=int, help="default: 64 for live, else 4")
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--routers", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.33, help="share of the workers' capacity")
    parser.add_argument("--shared-index", action="store_true")
    parser.add_argument("--roles", action="store_true")
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.slots = args.slots or (64 if args.part == "live" else SLOTS)
    if args.part == "index":
        print(json.dumps(uvloop.run(index(args)), indent=1))
        return
    server = start(args, ["a", "b"])
    try:
        print(json.dumps(uvloop.run(PARTS[args.part](args, server)), indent=1))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
