#!/usr/bin/env python3
"""A worker that stands still (SIGSTOP) under load, goes on, and a load of twice what is borne.

    benchmarks/freeze.py [--seconds 30] [--streams 40] [--rate 4] [--model DIR]

Four mock workers, 23 ms a step. Long streams run when one worker is stopped; new requests of 20 tokens
come all the time. After SIGCONT the same, until the thawed worker has answered. Then, with workers of
four places each, twice their capacity is offered for `--overload` seconds: nobody may be left out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import overload
import uvloop
from bars import Bars
from load import vocabulary
from processes import deployment_of, metric, ready, wait_ready
from servers import Server, start_ours
from streams import Crowd, Lag, Stream, in_ms, now

from dynamo.runtime.deployment import ProcessRecord

PROMPT, SHORT, WORKERS, STEP_S = 64, 20, 4, 0.023
BEFORE_S, AFTER_S, GOOD_S = 3.0, 5.0, 2.0
TIMING = ("--timing", "constant:0.015,23")
LEFT_OUT = ("dynamo_workers_ejected_total", "dynamo_workers_frozen_total")


async def trickle(
    crowd: Crowd, keys: itertools.count[int], rate: float, duration_s: float
) -> Sequence[Stream]:
    """Short requests at equal distances; all their answers."""
    began, asked = now(), list[asyncio.Task[Stream]]()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * duration_s)):
            await asyncio.sleep(max(0.0, began + number / rate - now()))
            key = next(keys)
            asked.append(group.create_task(crowd.ask(key, crowd.wire(key, PROMPT, SHORT))))
        await asyncio.sleep(max(0.0, began + duration_s - now()))
    return [one.result() for one in asked]


async def frozen(args: argparse.Namespace, url: str, victim: ProcessRecord) -> dict[str, Any]:
    """Stop, go on; what readers noticed."""
    whole_s = BEFORE_S + args.seconds + AFTER_S
    tokens = round(whole_s / STEP_S)
    crowd, keys = Crowd(url, vocabulary(args.model), hung_s=2 * whole_s + 60), itertools.count()
    async with Lag() as lag, asyncio.TaskGroup() as group:
        streams = []
        for key in itertools.islice(keys, args.streams):
            wire = crowd.wire(key, PROMPT, tokens)
            streams.append(group.create_task(crowd.ask(key, wire)))
        await asyncio.sleep(BEFORE_S)
        began = now()
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            new = await trickle(crowd, keys, args.rate, args.seconds)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        thawed = now()
        after = await trickle(crowd, keys, args.rate, AFTER_S)
    old = [one.result() for one in streams]
    stuck = [one for one in old if one.worker == victim.instance]
    again = [one.times[0] - thawed for one in after if one.worker == victim.instance and one.times]
    errors = [one.error for one in (*old, *new, *after) if one.error]
    return {
        "streams": len(old),
        "stuck": len(stuck),
        "stuck_gap_ms": in_ms([one.gap_at(began, thawed) for one in stuck]),
        "others_gap_ms": in_ms([one.gap_at(began, thawed) for one in old if one not in stuck]),
        "streams_not_whole": sum(not one.whole(tokens) for one in old),
        "new": len(new),
        "new_in_time": sum(one.whole(SHORT) and one.ended - one.began <= GOOD_S for one in new),
        "new_ms": in_ms([one.ended - one.began for one in new]),
        "after": len(after),
        "after_whole": sum(one.whole(SHORT) for one in after),
        "after_by_the_thawed": len(again),
        "thawed_answers_after_s": round(min(again), 2) if again else None,
        "errors": dict(Counter(errors).most_common(5)),
        "client_late_ms": lag.figures(),
    }


async def twice(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Twice the capacity; how it went, and who was left out."""
    crowd, keys = Crowd(server.url, vocabulary(args.model)), itertools.count()
    rate = 2 * await overload.capacity(crowd, keys)
    found = await overload.offer(crowd, keys, rate, args.overload)
    seen = overload.outcome(found, float("inf"), args.overload)
    left_out = {name: metric(server, name) for name in LEFT_OUT}
    return {name: seen[name] for name in ("offered", "rejected", "failed", "errors")} | left_out


def bars(frozen: dict[str, Any], twice: dict[str, Any]) -> Bars:
    """The aims."""
    found = Bars()
    found.at_most("longest gap of a stuck stream", frozen["stuck_gap_ms"]["max"], 2100, " ms")
    found.at_least("new requests whole within 2 s", frozen["new_in_time"], frozen["new"])
    found.at_most("errors", sum(frozen["errors"].values()), 0)
    found.at_most("streams not whole", frozen["streams_not_whole"], 0)
    found.at_least("answered by the thawed worker", frozen["after_by_the_thawed"], 1)
    found.at_most("failed at twice the capacity", twice["failed"], 0)
    found.at_most("workers left out at twice the capacity", sum(twice[n] for n in LEFT_OUT), 0)
    return found


def main() -> None:
    """Start, stop a worker, overload, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--seconds", type=float, default=30, help="how long it stands still")
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4, help="new requests a second")
    parser.add_argument("--overload", type=float, default=20, help="seconds of twice the capacity")
    parser.add_argument("--router-mode", default="round_robin")
    args = parser.parse_args()
    server = start_ours(args.model, WORKERS, 1, args.router_mode, *TIMING)
    try:
        deployment = deployment_of(server)
        wait_ready(deployment, "worker", WORKERS)
        result = {"frozen": uvloop.run(frozen(args, server.url, ready(deployment, "worker")[0]))}
    finally:
        server.stop()
    server = overload.start(args.model, args.router_mode)
    try:
        result["twice"] = uvloop.run(twice(args, server))
    finally:
        server.stop()
    bars(**result).tell(result, f"{args.seconds:g} s frozen, mode {args.router_mode}")


if __name__ == "__main__":
    main()
