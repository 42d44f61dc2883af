#!/usr/bin/env python3
"""Streams under a storm of kills: what their readers notice.

    benchmarks/kill_storm.py [--duration 120] [--planes tcp|etcd-nats] [--routers N] [--model DIR]

A closed loop of `--streams` streams; every `--every` seconds one of four mock workers (23 ms a step)
is killed with SIGKILL, and with `--routers` every 12 s a router process besides (mode kv). First
every request is asked undisturbed: each text of the storm is compared with that.

A stream is hit by a kill when the killed worker was the one it began at; one that was moved before
is not counted again, for nobody outside knows where it went. Gaps are times without text.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import uvloop
from bars import Bars
from load import vocabulary
from processes import PLANES, Kill, Killer, deployment_of, planes, wait_ready
from servers import start_ours
from streams import Crowd, Lag, Stream, difference, in_ms, now

PROMPT = 64
APART_S = 4.0
ROUTER_EVERY_S = 12.0


async def closed(
    crowd: Crowd, wires: Sequence[bytes], keys: Iterable[int], streams: int, until: float = math.inf
) -> list[Stream]:
    """So many at a time, until the keys or the time are used up. They begin one after the other,
    so that some are anywhere when a worker dies."""
    found: list[Stream] = []
    left = iter(keys)

    async def slot(number: int) -> None:
        await asyncio.sleep(number / streams * APART_S)
        for key in left:
            found.append(await crowd.ask(key, wires[key]))
            if found[-1].error:
                await asyncio.sleep(0.2)
            if now() >= until:
                return

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(slot(number))
    return found


def counts(found: Sequence[Stream], reference: dict[int, Stream], tokens: int) -> dict[str, Any]:
    """How the answers ended, and how their texts differ."""
    total, changed, errors = Counter[str](), Counter[str](), Counter[str]()
    for one in found:
        if one.error:
            total["hung" if one.error == "hung" else "failed"] += 1
            errors[f"after {len(one.pieces)} pieces: {one.error}"] += 1
            continue
        total["ok" if one.whole(tokens) else "miscounted"] += 1
        changed += difference(reference[one.key].pieces, one.pieces)
    return {
        "requests": len(found),
        **{name: total[name] for name in ("ok", "failed", "hung", "miscounted")},
        **{name: changed[name] for name in ("lost", "doubled", "altered")},
        "errors": dict(errors.most_common(8)),
    }


def gaps(found: Sequence[Stream], kills: Sequence[Kill]) -> dict[str, Any]:
    """The longest gap around each kill, of the streams it hit and of the others."""
    hit: list[float] = []
    others: list[float] = []
    moved: set[Stream] = set()
    for kill in kills:
        for one in found:
            if one.error or not one.times or not one.times[0] < kill.at < one.times[-1]:
                continue
            if one in moved:
                continue
            if one.worker == kill.instance:
                moved.add(one)
                hit.append(one.gap_at(kill.at))
            else:
                others.append(one.gap_at(kill.at))
    return {"hit_gap_ms": in_ms(hit), "others_gap_ms": in_ms(others)}


async def storm(args: argparse.Namespace, url: str, killers: Sequence[Killer]) -> dict[str, Any]:
    """The reference, then the storm."""
    crowd = Crowd(url, vocabulary(args.model))
    wires = [crowd.wire(key, PROMPT, args.tokens) for key in range(2 * args.streams)]
    whole = await closed(crowd, wires, range(len(wires)), args.streams)
    reference = {one.key: one for one in whole if one.whole(args.tokens)}
    if len(reference) < len(wires):
        raise SystemExit(f"undisturbed, {len(wires) - len(reference)} requests failed")
    for killer in killers:
        killer.start()
    endless = itertools.cycle(range(len(wires)))
    async with Lag() as lag:
        found = await closed(crowd, wires, endless, args.streams, now() + args.duration)
    for killer in killers:
        killer.stop()
    return {
        **counts(found, reference, args.tokens),
        "kills": {killer.name: len(killer.kills) for killer in killers},
        "workers_at_kill": dict(Counter(kill.ready for kill in killers[0].kills)),
        **gaps(found, killers[0].kills),
        "first_ms": in_ms([one.first_s for one in found if one.times]),
        "client_late_ms": lag.figures(),
    }


def bars(result: dict[str, Any]) -> Bars:
    """The aims."""
    found = Bars()
    for name in ("failed", "hung", "miscounted", "lost", "doubled", "altered"):
        found.at_most(name, result[name], 0)
    hit = result["hit_gap_ms"]
    if hit["n"]:
        found.at_most("longest gap of a hit stream, p50", hit["p50"], 150, " ms")
        found.at_most("longest gap of a hit stream, p99", hit["p99"], 400, " ms")
    return found


def main() -> None:
    """Start, kill, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--duration", type=float, default=120)
    parser.add_argument("--every", type=float, default=5, help="seconds between kills of a worker")
    parser.add_argument("--planes", choices=PLANES, default="tcp")
    parser.add_argument("--routers", type=int, default=0, help="router processes, mode kv")
    parser.add_argument("--router-mode", default="", help="default: round_robin, kv with --routers")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    mode = args.router_mode or ("kv" if args.routers else "round_robin")
    more = ("--timing", "constant:0.015,23", "--router-replicas", str(args.routers))
    with planes(args.planes) as flags:
        server = start_ours(args.model, args.workers, 1, mode, *more, *flags)
        try:
            deployment = deployment_of(server)
            killers = [Killer(deployment, "worker", args.every, 1)]
            wait_ready(deployment, "worker", args.workers)
            if args.routers:
                killers.append(Killer(deployment, "router", ROUTER_EVERY_S, 0))
                wait_ready(deployment, "router", args.routers)
            result = uvloop.run(storm(args, server.url, killers))
        finally:
            server.stop()
    title = f"{args.streams} streams, planes {args.planes}, mode {mode}, {args.routers} routers"
    bars(result).tell(result, title)


if __name__ == "__main__":
    main()
