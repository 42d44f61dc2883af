#!/usr/bin/env python3
"""Offer one, two and three times the capacity of the workers and count good, late and rejected requests.

    benchmarks/overload.py [--modes round_robin,kv] [--multiples 1,2,3] [--model DIR]

Four mock workers have four slots each and take 23 ms a step; only `--ttft-slo` is set. A closed loop
measures the capacity. Then requests with distinct prompts arrive at random (Poisson) at multiples of it.

- Good: complete, with the first text within the SLO.
- Late: complete, with a later first text.
- Rejected: 429 or 503.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop
from load import vocabulary
from processes import deployment_of, wait_ready
from servers import Server, start_ours
from streams import LoopLag, Stream, StreamClient, now, percentiles_ms, quantile
from targets import Targets

PROMPT, TOKENS, WORKERS = 256, 60, 4
CLOSED, CLOSED_S = 32, 12.0
SMALL = ("--max-num-seqs", "4", "--num-blocks", "64", "--block-size", "64")
TIMING = ("--timing", "constant:0.05,23")
REJECTED_STATUSES = (429, 503)


def start(model: str, mode: str, *more: str) -> Server:
    """Start four small workers and wait until all are ready."""
    server = start_ours(model, WORKERS, 1, mode, *SMALL, *TIMING, *more)
    wait_ready(deployment_of(server), "worker", WORKERS)
    return server


async def capacity(client: StreamClient, keys: Iterator[int]) -> float:
    """Return the answers per second of a closed loop with twice as many clients as slots. The first
    quarter of the time is not counted."""
    started, streams = now(), list[Stream]()

    async def run_slot() -> None:
        while now() < started + CLOSED_S:
            key = next(keys)
            streams.append(await client.send(key, client.encode_request(key, PROMPT, TOKENS)))

    async with asyncio.TaskGroup() as group:
        for _ in range(CLOSED):
            group.create_task(run_slot())
    low, high = started + CLOSED_S / 4, started + CLOSED_S
    ended = [
        stream.ended
        for stream in streams
        if stream.is_complete(TOKENS) and low < stream.ended <= high
    ]
    return len(ended) / (high - low)


async def offer(
    client: StreamClient, keys: Iterator[int], rate: float, duration_s: float
) -> Sequence[Stream]:
    """Send requests at random at a mean rate and return all their streams."""
    rng = random.Random(round(rate * 1e3))
    when, end = now(), now() + duration_s
    async with asyncio.TaskGroup() as group:
        tasks = []
        while (when := when + rng.expovariate(rate)) < end:
            key = next(keys)
            request = client.encode_request(key, PROMPT, TOKENS)
            await asyncio.sleep(max(0.0, when - now()))
            tasks.append(group.create_task(client.send(key, request)))
    return [task.result() for task in tasks]


def outcome(streams: Sequence[Stream], slo_s: float, duration_s: float) -> dict[str, Any]:
    """Count the outcomes of a load."""
    complete = [stream for stream in streams if stream.is_complete(TOKENS)]
    rejected = [stream for stream in streams if stream.status in REJECTED_STATUSES]
    failed = [
        stream
        for stream in streams
        if stream.status not in REJECTED_STATUSES and not stream.is_complete(TOKENS)
    ]
    good = sum(stream.first_s <= slo_s for stream in complete)
    return {
        "offered": len(streams),
        "good": good,
        "good_per_s": round(good / duration_s, 2),
        "late": len(complete) - good,
        "rejected": len(rejected),
        "failed": len(failed),
        "errors": dict(Counter(stream.error for stream in failed).most_common(5)),
        "without_retry_after": sum("retry-after" not in stream.headers for stream in rejected),
        "first_p99_s": round(quantile([stream.first_s for stream in complete], 0.99), 2),
        "rejected_ms": percentiles_ms([stream.ended - stream.started for stream in rejected]),
    }


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Measure the capacity, then each multiple of it."""
    client, keys = StreamClient(url, vocabulary(args.model)), itertools.count()
    result: dict[str, Any] = {"capacity_per_s": round(await capacity(client, keys), 2)}
    for times in map(float, args.multiples.split(",")):
        rate = times * result["capacity_per_s"]
        async with LoopLag() as lag:
            answers = await offer(client, keys, rate, args.duration)
        outcome_of_load = outcome(answers, args.slo, args.duration)
        result[f"{times:g}x"] = outcome_of_load | {"client_late_ms": lag.percentiles()}
    return result


def add_targets(targets: Targets, mode: str, result: dict[str, Any]) -> None:
    """Add the targets of a mode."""
    steps = {
        name: outcome_of_load
        for name, outcome_of_load in result.items()
        if name != "capacity_per_s"
    }
    for name, outcome_of_load in steps.items():
        load = f"{mode} {name}"
        targets.at_least(
            f"{load}: good per second", outcome_of_load["good_per_s"], result["capacity_per_s"]
        )
        targets.at_most(f"{load}: late", outcome_of_load["late"], 0)
        targets.at_most(f"{load}: failed", outcome_of_load["failed"], 0)
        if outcome_of_load["rejected"]:
            targets.at_most(
                f"{load}: rejected, p99", outcome_of_load["rejected_ms"]["p99"], 10, " ms"
            )
            targets.at_most(
                f"{load}: without Retry-After", outcome_of_load["without_retry_after"], 0
            )


def main() -> None:
    """Run every mode and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--modes", default="round_robin,kv")
    parser.add_argument("--multiples", default="1,2,3")
    parser.add_argument("--duration", type=float, default=20, help="seconds per multiple")
    parser.add_argument("--slo", type=float, default=2, help="seconds to the first token")
    args = parser.parse_args()
    result, targets = dict[str, Any](), Targets()
    for mode in args.modes.split(","):
        server = start(args.model, mode, "--ttft-slo", f"{args.slo:g}")
        try:
            result[mode] = uvloop.run(measure(args, server.url))
        finally:
            server.stop()
        add_targets(targets, mode, result[mode])
    targets.print_report(result, f"{args.duration:g} s a load, promise {args.slo:g} s")


if __name__ == "__main__":
    main()
