#!/usr/bin/env python3
"""Serve several models on one port: does one disturb another, and do changes lose requests?

    benchmarks/several_models.py isolation [--seconds 20] [--long] [--model DIR]
    benchmarks/several_models.py index [--seconds 20] [--model DIR] [--workers 4] [--rounds 2]
        [--frontends 4] [--routers 2] [--shared-index] [--roles] [--tiers]
    benchmarks/several_models.py live [--changes 30] [--rate 40] [--frontends 2] [--model DIR]

`isolation`: model `a` is offered five times what its two mock workers compute, and they are killed
every 5 s; model `b` is offered half of what its own compute. The first token of `b` is compared with
`b` alone before. With `--long` the prompts for `a` have most of its context.

`index`: three models, with blocks of 16 and 32 tokens, get the same conversations, whose prompts
share beginnings. Hit ratios, first tokens, CPU and bytes of indexes are compared with those of three
deployments of one model each. These run at once, so that the machine is as busy. `--rounds`
alternates the two.

`live`: `--campaigns` of changes follow each other: what a frontend grows in the first and not in later
ones is no leak. Models are added and removed, aliases moved and workers scaled in random order under load. A
request may only fail under a name that was removed, with 404. At the end everything is as before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import Any

import uvloop
from load import rss_mb, vocabulary
from own_index import SLOTS, STEP_MS, TOKENS, WORKERS, index, start
from processes import deployment_of, ready
from servers import Server
from streams import LoopLag, Stream, StreamClient, now, percentiles_ms

CAPACITY = WORKERS * SLOTS / (TOKENS * STEP_MS / 1e3)
"""Requests a second that the workers of a model compute."""
FLOOD, KILL_S = 5, 5.0
PROMPT, LONG_PROMPT = 30, 1500
GRACE_S = 1.0
"""A removed name may be answered for this long."""


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


async def dynamo(server: Server, *words: str) -> str:
    """Run a command on the deployment, and return its output."""
    command = [sys.executable, "-m", "dynamo", *words, "--deployment", server.url.rsplit(":", 1)[1]]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {output.decode()}")
    return output.decode()


class Changes:
    """Changes the models of a deployment. `removed` has the times at which names went."""

    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        self._args, self._server, self._rng = args, server, random.Random(args.seed)
        self._numbers = itertools.count()
        self.added: list[str] = []
        self.removed: dict[str, float] = {}
        self.names = ["a", "b", "chat"]
        self.done = Counter[str]()

    async def run(self) -> None:
        """Make all changes, then remove what was added."""
        for _ in range(self._args.changes):
            change = self._rng.choice([self._add, self._remove, self._move, self._scale])
            await change()
        while self.added:
            await self._remove()
        await dynamo(self._server, "models", "--alias", "chat=a")

    async def _add(self) -> None:
        name = f"m{next(self._numbers)}"
        await dynamo(self._server, "add", self._args.model, "out=mock", "--model-name", name)
        self.added.append(name)
        self.names.append(name)
        self.done["added"] += 1

    async def _remove(self) -> None:
        if not self.added:
            return
        name = self.added.pop(self._rng.randrange(len(self.added)))
        if name in (await dynamo(self._server, "models")).split("chat", 1)[0].split()[-1:]:
            await dynamo(self._server, "models", "--alias", "chat=a")
        # Requests for the name go on for a while after it is removed.
        self.removed[name] = now()
        await dynamo(self._server, "remove", name)
        self.names.remove(name)
        self.done["removed"] += 1

    async def _move(self) -> None:
        model = self._rng.choice(["a", "b"])
        await dynamo(self._server, "models", "--alias", f"chat={model}")
        self.done["moved"] += 1

    async def _scale(self) -> None:
        count = self._rng.choice([1, 2, 3])
        await dynamo(self._server, "scale", f"{self._rng.choice('ab')}-worker={count}")
        self.done["scaled"] += 1


def series(url: str) -> set[str]:
    """Return the gauges of the frontends and how many workers each model has."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        text = answer.read().decode()
    return {line.rpartition(" ")[0] for line in text.splitlines() if re.search(r'model="m\d', line)}


async def live(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Return how requests fared while models changed."""
    load = Load(StreamClient(server.url, vocabulary(args.model)), itertools.count())
    changes = Changes(args, server)
    await dynamo(server, "models", "--alias", "chat=a")
    await load.run(["a", "b"], args.rate, 5)
    deployment = deployment_of(server)
    memory = [[rss_mb(process.pid) for process in ready(deployment, "frontend")]]
    for _ in range(args.campaigns):
        changing = asyncio.create_task(changes.run())
        while not changing.done():
            await load.run(tuple(changes.names), args.rate, 1)
        await changing
        await asyncio.sleep(3)
        memory.append([rss_mb(process.pid) for process in ready(deployment, "frontend")])
    failed, late = Counter[str](), 0
    for name, stream in load.streams:
        if stream.is_complete(TOKENS):
            late += stream.started > changes.removed.get(name, now()) + GRACE_S
        elif not (name in changes.removed and stream.status == 404):
            failed[f"{name[:1]}: {stream.error[:80]}"] += 1
    return {
        "requests": len(load.streams),
        "changes": changes.done,
        "refused_404": sum(stream.status == 404 for _, stream in load.streams),
        "answered_late": late,
        "failed": failed,
        "series_left": sorted(series(server.url)),
        "processes": sorted(process.name for process in deployment.live_processes()),
        "frontend_mb_grown": [
            [round(a - b, 1) for a, b in zip(after, before, strict=True)]
            for before, after in itertools.pairwise(memory)
        ],
    }


PARTS = {"isolation": isolation, "live": live}


def main() -> None:
    """Run one part, and print its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=(*PARTS, "index"))
    parser.add_argument("--model", default="")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--changes", type=int, default=30)
    parser.add_argument("--campaigns", type=int, default=2)
    parser.add_argument("--rate", type=float, default=40)
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
