#!/usr/bin/env python3
"""Load models when they are wanted: does each request get its answer, and each model its turn?

    benchmarks/on_demand.py burst [--requests 100] [--model DIR]
    benchmarks/on_demand.py room [--seconds 60] [--rate 4] [--model DIR]
    benchmarks/on_demand.py kills [--seconds 60] [--every 2.5] [--model DIR]

`burst`: requests come at once for a mock model that is not loaded and takes two seconds to start.

`room`: three mock models are asked at random where the memory holds two. Each request has to be
answered within the time of three loads, and no answer may be cut.

`kills`: a frontend, a worker that loads, or the supervisor is killed at random moments. A request may
fail, but none may last longer than its own limit. In the end, each model is served again, and no
process is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from load import vocabulary
from servers import free_port
from streams import Stream, StreamClient, now, percentiles_ms

from dynamo.runtime.deployment import live_deployments

TOKENS, STEP_MS, SLOTS, PROMPT = 10, 20, 8, 20
STARTUP_S = 1.0
"""The engine's own time to start; the process takes about as long to be there."""
BURST_LIMIT_S, LIMIT_S, GRACE_S = 3.0, 8.0, 1.0
LOADS_LIMIT = 3
NAMES = ("a", "b", "c")


class Host:
    """A deployment of mock models on demand, which is started again when it was killed."""

    def __init__(self, args: argparse.Namespace, names: Sequence[str], **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = Path(tempfile.mkdtemp())
        engine = {
            "kind": "mock",
            "timing": f"constant:0.01,{STEP_MS}",
            "max_num_seqs": SLOTS,
            "startup": args.startup,
        }
        models = [
            {"path": args.model, "name": name, "load": "on_demand", "memory": "1GiB"}
            for name in names
        ]
        document = {
            "server": {"http_port": self.port, "request_timeout": args.limit},
            "engine": engine,
            "models": models,
            **settings,
        }
        (self._folder / "models.yaml").write_text(json.dumps(document))
        self.log = self._folder / "log"
        self.log.touch()
        self._file = self.log.open("ab")
        self.start()

    def start(self) -> None:
        """Start the deployment, and wait until it serves."""
        command = [sys.executable, "-m", "dynamo", "run", "-f", str(self._folder / "models.yaml")]
        self.child = subprocess.Popen(command, stdout=self._file, stderr=self._file)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health"):
                return
            time.sleep(0.1)
        sys.exit(f"{self.url} does not answer: see {self.log}")

    def stop(self) -> None:
        """Stop the deployment, and wait until it has ended."""
        self.child.send_signal(signal.SIGTERM)
        self.child.wait(60)
        self._file.close()

    def loads_s(self) -> list[float]:
        """Return how long each load took."""
        times = re.findall(r"a model is loaded model=\w+ seconds=(\S+)", self.log.read_text())
        return list(map(float, times))

    def processes(self, role: str, state: str = "") -> list[int]:
        """Return the pids of the processes of a role."""
        return [
            record.pid
            for deployment in live_deployments()
            if deployment.id == f"http-{self.port}"
            for record in deployment.live_processes()
            if record.role == role and state in {"", record.state}
        ]


async def burst(args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of requests that come at once."""
    host = Host(args, ["wanted"])
    client = StreamClient(host.url, vocabulary(args.model))
    requests = [client.encode_request(key, PROMPT, 1, "wanted") for key in range(args.requests)]
    started = now()
    streams = await asyncio.gather(*itertools.starmap(client.send, enumerate(requests)))
    took_s = now() - started
    host.stop()
    loads = host.loads_s()
    failed = Counter(stream.error[:80] for stream in streams if not stream.is_complete(1))
    holds = len(loads) == 1 and not failed and took_s <= BURST_LIMIT_S
    report = {"starts": len(loads), "load_s": loads, "all_answered_s": round(took_s, 2)}
    return {**report, "failed": failed, "holds": holds}


async def send_at_random(
    client: StreamClient, args: argparse.Namespace, ended: asyncio.Event
) -> Sequence[tuple[str, Stream]]:
    """Send requests for a random model at the rate until the time is over."""
    rng, tasks, started = random.Random(args.seed), list[Any](), now()

    async def send(key: int, name: str) -> tuple[str, Stream]:
        return name, await client.send(key, client.encode_request(key, PROMPT, TOKENS, name))

    async with asyncio.TaskGroup() as group:
        for key in range(round(args.rate * args.seconds)):
            await asyncio.sleep(max(0.0, started + key / args.rate - now()))
            tasks.append(group.create_task(send(key, rng.choice(NAMES))))
    ended.set()
    return [task.result() for task in tasks]


async def room(args: argparse.Namespace) -> dict[str, Any]:
    """Return how requests for three models fared where the memory holds two."""
    host = Host(args, NAMES, runtime={"memory": "2GiB"})
    client = StreamClient(host.url, vocabulary(args.model))
    answers = await send_at_random(client, args, asyncio.Event())
    host.stop()
    streams = [stream for _, stream in answers]
    loads = host.loads_s()
    failed = Counter(stream.error[:120] for stream in streams if not stream.is_complete(TOKENS))
    longest_s = max(stream.first_s for stream in streams)
    cut = len(re.findall(r"continues on another worker", host.log.read_text()))
    return {
        "requests": len(streams),
        "loads": len(loads),
        "longest_load_s": max(loads),
        "first_token_ms": percentiles_ms([stream.first_s for stream in streams]),
        "longest_wait_loads": round(longest_s / max(loads), 2),
        "failed": failed,
        "cut": cut,
        "holds": not failed and not cut and longest_s <= LOADS_LIMIT * max(loads),
    }


async def kill_at_random(
    host: Host, kills: Counter[str], ended: asyncio.Event, args: argparse.Namespace
) -> None:
    """Kill processes of the deployment until the end, and start the supervisor again."""
    rng = random.Random(args.seed)
    while not ended.is_set():
        await asyncio.sleep(args.every * rng.uniform(0.4, 1.6))
        role, pids = rng.choice(["frontend", "worker", "worker", "supervisor"]), list[int]()
        while not (pids or ended.is_set()):
            state = "starting" if role == "worker" else ""
            pids = await asyncio.to_thread(host.processes, role, state)
            await asyncio.sleep(0.02)
        if not pids:
            return
        kills[role] += 1
        os.kill(rng.choice(pids), signal.SIGKILL)
        if role == "supervisor":
            await asyncio.to_thread(host.child.wait)
            await asyncio.to_thread(host.start)


async def kills(args: argparse.Namespace) -> dict[str, Any]:
    """Return how long requests lasted while processes were killed."""
    host = Host(args, NAMES, runtime={"memory": "2GiB"})
    client = StreamClient(host.url, vocabulary(args.model), hung_s=3 * args.limit)
    counts, ended = Counter[str](), asyncio.Event()
    killing = asyncio.create_task(kill_at_random(host, counts, ended, args))
    answers = await send_at_random(client, args, ended)
    await killing
    served = [name for name in NAMES if await is_served(client, name)]
    host.stop()
    left = len(host.processes("worker") + host.processes("frontend"))
    durations = [stream.ended - stream.started for _, stream in answers]
    errors = Counter(re.sub(r"[\d.]+", "N", stream.error)[:60] for _, stream in answers)
    return {
        "kills": counts,
        "requests": len(answers),
        "ends": errors,
        "longest_s": round(max(durations), 2),
        "limit_s": args.limit,
        "served_in_the_end": served,
        "processes_left": left,
        "holds": max(durations) <= args.limit + GRACE_S and len(served) == len(NAMES) and not left,
    }


async def is_served(client: StreamClient, name: str) -> bool:
    """Return whether a model answers within a minute."""
    deadline = now() + 60
    while now() < deadline:
        stream = await client.send(0, client.encode_request(0, PROMPT, TOKENS, name))
        if stream.is_complete(TOKENS):
            return True
        await asyncio.sleep(0.5)
    return False


PARTS = {"burst": burst, "room": room, "kills": kills}


def main() -> None:
    """Run one part, and print its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=4)
    parser.add_argument("--startup", type=float, default=STARTUP_S)
    parser.add_argument("--every", type=float, default=2.5, help="seconds between kills")
    parser.add_argument("--limit", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.limit = args.limit or (LIMIT_S if args.part == "kills" else 60)
    print(json.dumps(uvloop.run(PARTS[args.part](args)), indent=1))


if __name__ == "__main__":
    main()
