#!/usr/bin/env python3
"""One, two and three times the load that the workers bear: who is served well, who is turned away.

    benchmarks/overload.py [--modes round_robin,kv] [--multiples 1,2,3] [--model DIR]

Four mock workers of four places each, 23 ms a step, `--ttft-slo` and nothing else. A closed loop finds
the capacity; then requests come at random (Poisson) at multiples of it, each a prompt of its own.
Good: whole, its first text within the promise. Late: whole, but later. Rejected: 429 or 503.
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
from bars import Bars
from load import vocabulary
from processes import deployment_of, wait_ready
from servers import Server, start_ours
from streams import Crowd, Lag, Stream, in_ms, now, quantile

PROMPT, TOKENS, WORKERS = 256, 60, 4
CLOSED, CLOSED_S = 32, 12.0
SMALL = ("--max-num-seqs", "4", "--num-blocks", "64", "--block-size", "64")
TIMING = ("--timing", "constant:0.05,23")
TURNED_AWAY = (429, 503)


def start(model: str, mode: str, *more: str) -> Server:
    """Four small workers, all ready."""
    server = start_ours(model, WORKERS, 1, mode, *SMALL, *TIMING, *more)
    wait_ready(deployment_of(server), "worker", WORKERS)
    return server


async def capacity(crowd: Crowd, keys: Iterator[int]) -> float:
    """Answers a second in a closed loop of twice as many as there are places; the first quarter is
    not counted."""
    began, found = now(), list[Stream]()

    async def slot() -> None:
        while now() < began + CLOSED_S:
            key = next(keys)
            found.append(await crowd.ask(key, crowd.wire(key, PROMPT, TOKENS)))

    async with asyncio.TaskGroup() as group:
        for _ in range(CLOSED):
            group.create_task(slot())
    low, high = began + CLOSED_S / 4, began + CLOSED_S
    ended = [one.ended for one in found if one.whole(TOKENS) and low < one.ended <= high]
    return len(ended) / (high - low)


async def offer(
    crowd: Crowd, keys: Iterator[int], rate: float, duration_s: float
) -> Sequence[Stream]:
    """Requests at random, so many a second on average; all their answers."""
    rng = random.Random(round(rate * 1e3))
    when, end = now(), now() + duration_s
    async with asyncio.TaskGroup() as group:
        asked = []
        while (when := when + rng.expovariate(rate)) < end:
            key = next(keys)
            wire = crowd.wire(key, PROMPT, TOKENS)
            await asyncio.sleep(max(0.0, when - now()))
            asked.append(group.create_task(crowd.ask(key, wire)))
    return [one.result() for one in asked]


def outcome(found: Sequence[Stream], slo_s: float, duration_s: float) -> dict[str, Any]:
    """How one load went."""
    whole = [one for one in found if one.whole(TOKENS)]
    rejected = [one for one in found if one.status in TURNED_AWAY]
    failed = [one for one in found if one.status not in TURNED_AWAY and not one.whole(TOKENS)]
    good = sum(one.first_s <= slo_s for one in whole)
    return {
        "offered": len(found),
        "good": good,
        "good_per_s": round(good / duration_s, 2),
        "late": len(whole) - good,
        "rejected": len(rejected),
        "failed": len(failed),
        "errors": dict(Counter(one.error for one in failed).most_common(5)),
        "without_retry_after": sum("retry-after" not in one.headers for one in rejected),
        "first_p99_s": round(quantile([one.first_s for one in whole], 0.99), 2),
        "rejected_ms": in_ms([one.ended - one.began for one in rejected]),
    }


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Capacity, then each multiple of it."""
    crowd, keys = Crowd(url, vocabulary(args.model)), itertools.count()
    found: dict[str, Any] = {"capacity_per_s": round(await capacity(crowd, keys), 2)}
    for times in map(float, args.multiples.split(",")):
        rate = times * found["capacity_per_s"]
        async with Lag() as lag:
            answers = await offer(crowd, keys, rate, args.duration)
        seen = outcome(answers, args.slo, args.duration)
        found[f"{times:g}x"] = seen | {"client_late_ms": lag.figures()}
    return found


def bars(found: Bars, mode: str, result: dict[str, Any]) -> None:
    """The aims of one mode."""
    steps = {name: seen for name, seen in result.items() if name != "capacity_per_s"}
    for name, seen in steps.items():
        which = f"{mode} {name}"
        found.at_least(f"{which}: good a second", seen["good_per_s"], result["capacity_per_s"])
        found.at_most(f"{which}: late", seen["late"], 0)
        found.at_most(f"{which}: failed", seen["failed"], 0)
        if seen["rejected"]:
            found.at_most(f"{which}: rejected, p99", seen["rejected_ms"]["p99"], 10, " ms")
            found.at_most(f"{which}: without Retry-After", seen["without_retry_after"], 0)


def main() -> None:
    """Start, load, print, for each mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--modes", default="round_robin,kv")
    parser.add_argument("--multiples", default="1,2,3")
    parser.add_argument("--duration", type=float, default=20, help="seconds a multiple")
    parser.add_argument("--slo", type=float, default=2, help="seconds to the first token")
    args = parser.parse_args()
    result, found = dict[str, Any](), Bars()
    for mode in args.modes.split(","):
        server = start(args.model, mode, "--ttft-slo", f"{args.slo:g}")
        try:
            result[mode] = uvloop.run(measure(args, server.url))
        finally:
            server.stop()
        bars(found, mode, result[mode])
    found.tell(result, f"{args.duration:g} s a load, promise {args.slo:g} s")


if __name__ == "__main__":
    main()
