#!/usr/bin/env python3
"""Time to the first token of 1,536 cached and 32 new tokens, by where the blocks are, against computing.

    benchmarks/tier_ttft.py [--rounds 7] [--tiers device,host,disk,shared,slow] [--restarts 3] [--path FOLDER]

A native worker gets a request at a time. A round sends a new prompt, whose blocks push those of the last one out of
device memory, then the last prompt with another end. So both times of a ratio are neighbours. The page cache of the
disk tier is dropped before each load. After the rounds the worker is killed (SIGKILL) and the first request of the new
one has an earlier prompt. `shared` is SeaweedFS on this machine. `slow` is the same behind a relay of 0.3 MB/s a connection, beside
a deployment without tiers: the worker should compute, and need as long as the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
from load import vocabulary
from processes import deployment_of, ready
from servers import Server, start_ours
from streams import Stream, StreamClient, now
from targets import Targets

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.relay import Relay
from tests.support.servers import S3Process

MAX_RATIO = {"host": 1 / 10, "disk": 1 / 8, "shared": 1 / 5}
RESTARTED = {"disk": 1 / 8, "shared": 1 / 5}
MAX_SLOW_RATIO = 1.03
CACHED_WORDS, END_WORDS = 1512, 27
"""With the chat template, 1,536 tokens in whole blocks and 32 more."""
BLOCKS = {"device": 800}
TIGHT_BLOCKS = 130
RELAY_DELAY_S = 0.2


class Bench:
    """A deployment of one worker, and the prompts that it was sent."""

    def __init__(self, server: Server, words: Sequence[str]) -> None:
        self.server = server
        self._client = StreamClient(server.url, words, hung_s=600)
        self._words = words

    async def send(self, key: int, end: int) -> Stream:
        """Send the prompt `key` with one of its ends, and return the stream."""
        pick = random.Random(key).choices(self._words, k=CACHED_WORDS)
        pick += random.Random(f"{key} {end}").choices(self._words, k=END_WORDS)
        body = {
            "model": "smol", "messages": [{"role": "user", "content": " ".join(pick)}],
            "temperature": 0, "max_tokens": 2, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        stream = await self._client.send(key, head.encode() + data)
        if not stream.is_complete(2):
            raise SystemExit(f"a request failed: {stream.error}")
        return stream

    async def tiers(self) -> dict[str, dict[str, Any]]:
        """Return the counters of the worker's tiers by name."""
        port = self.server.url.rpartition(":")[2]
        command = (sys.executable, "-m", "dynamo", "kv", "--json", "--deployment", f"http-{port}")
        shown = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        return {row["tier"]: row for row in json.loads(shown.stdout)}

    async def settle(self) -> dict[str, dict[str, Any]]:
        """Wait until the worker has stored what it will store."""
        stored: Any = None
        while True:
            tiers = await self.tiers()
            counts = {name: row["stored"] for name, row in tiers.items()}
            if counts == stored:
                return tiers
            stored = counts
            await asyncio.sleep(0.5)

    async def restart_worker(self) -> None:
        """Kill the worker and wait for the next one."""
        deployment = deployment_of(self.server)
        (worker,) = ready(deployment, "worker")
        os.kill(worker.pid, signal.SIGKILL)
        end = now() + 120
        while not any(new.pid != worker.pid for new in ready(deployment, "worker")):
            if now() > end:
                raise SystemExit("no worker after 120 s")
            await asyncio.sleep(0.2)
        await asyncio.sleep(2)  # the frontend has to know it


def drop_page_cache(folder: str) -> None:
    """Drop the pages of all files in a folder."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


async def measure(tier: str, bench: Bench, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds of one tier, and the restarts of a tier that outlives them."""
    await bench.send(0, 0)
    computed, loaded, restarted = [], [], []
    for key in range(1, args.rounds + 1):
        computed.append((await bench.send(key, 0)).first_s)
        await bench.settle()
        drop_page_cache(folder)
        loaded.append((await bench.send(key - (tier != "device"), key)).first_s)
    hits = (await bench.settle()).get(tier, {}).get("hits", 0)
    for number in range(args.restarts if tier in RESTARTED else 0):
        await bench.settle()
        await bench.restart_worker()
        drop_page_cache(folder)
        restarted.append((await bench.send(1 + number, 100 + number)).first_s)
    result = compare(computed, loaded)
    if restarted:
        result |= {
            f"{name}_after_kill": value for name, value in compare(computed, restarted).items()
        }
    return result | {"blocks_loaded": hits}


async def measure_slow(benches: Sequence[Bench], relay: Relay, rounds: int) -> dict[str, Any]:
    """Send the same prompts to a worker without tiers and to one with a slow store, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for bench in benches:
        await bench.send(0, 0)
    for key in range(1, 2 * rounds + 1):
        relay.delay_s = 0.0
        for bench in benches:
            await bench.send(key, 0)
        await benches[1].settle()
        relay.delay_s = RELAY_DELAY_S
        for number in (0, 1) if key % 2 else (1, 0):
            times[number].append((await benches[number].send(key - 1, key)).first_s)
    first, later = (statistics.median(b / a for a, b in list(zip(*times, strict=True))[part])
                    for part in (slice(2), slice(2, None)))  # fmt: skip
    return {
        "none_ms": round(statistics.median(times[0]) * 1e3),
        "slow_ms": round(statistics.median(times[1]) * 1e3),
        "first_ratio": round(first, 3),
        "ratio": round(later, 3),
    }


def compare(computed: Sequence[float], loaded: Sequence[float]) -> dict[str, Any]:
    """Return the medians in milliseconds, and how many times quicker loading is. Answers without
    visible text have no first text."""
    whole, part = (statistics.median(filter(math.isfinite, times)) for times in (computed, loaded))
    return {
        "computed_ms": round(whole * 1e3),
        "first_token_ms": round(part * 1e3, 1),
        "times_quicker": round(whole / part, 1),
    }


async def run(args: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Measure the tiers one after the other."""
    words = vocabulary(args.model)
    tiers = args.tiers.split(",")
    result: dict[str, Any] = {}
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.path))
    if {"shared", "slow"} & set(tiers):
        s3 = stack.enter_context(S3Process())
        os.environ |= s3.environ
    flags = {
        "host": ("--kv-host-size", "2GB"),
        "disk": ("--kv-disk-size", "4GB", "--kv-disk-path", folder),
        "shared": ("--kv-remote-url", "s3://kv-blocks/bench"),
    }

    def start(tier: str, *more: str) -> Bench:
        blocks = ("--num-blocks", str(BLOCKS.get(tier, TIGHT_BLOCKS)))
        policy = ("--kv-offload-policy", "lru")
        server = start_ours(
            args.model, 1, 1, "round_robin", *blocks, *policy, *more, engine="native"
        )
        stack.callback(server.stop)
        return Bench(server, words)

    for tier in tiers:
        if tier == "slow":
            relay = await Relay(s3.port).__aenter__()
            none = start("none")
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{relay.port}"
            slow = start("slow", "--kv-remote-url", "s3://kv-blocks/slow")
            result[tier] = await measure_slow((none, slow), relay, args.rounds)
            none.server.stop()
            await relay.__aexit__()
        else:
            slow = start(tier, *flags.get(tier, ()))
            result[tier] = await measure(tier, slow, folder, args)
        slow.server.stop()
        print(tier, result[tier], flush=True)
    return result


def main() -> None:
    """Measure and compare with the targets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--tiers", default="device,host,disk,shared,slow")
    parser.add_argument("--path", default=None, help="folder on the disk to measure")
    args = parser.parse_args()
    with ExitStack() as stack:
        result = uvloop.run(run(args, stack))
    targets = Targets()
    for tier, ratio in MAX_RATIO.items():
        if tier in result:
            targets.at_least(f"{tier}, times quicker", result[tier]["times_quicker"], 1 / ratio)
    for tier, ratio in RESTARTED.items():
        if tier in result and args.restarts:
            times = result[tier]["times_quicker_after_kill"]
            targets.at_least(f"{tier} after SIGKILL, times quicker", times, 1 / ratio)
    if "slow" in result:
        targets.at_most("slow tier, of none", result["slow"]["ratio"], MAX_SLOW_RATIO)
    targets.print_report(result, f"1,536 cached and 32 new tokens, {args.rounds} rounds")
    sys.exit(targets.exit_code)


if __name__ == "__main__":
    main()
