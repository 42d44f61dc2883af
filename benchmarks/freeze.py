#!/usr/bin/env python3
"""Freeze a worker under load (SIGSTOP), resume it, and then offer twice the capacity.

    benchmarks/freeze.py [--seconds 4] [--streams 40] [--rate 4] [--model DIR]

Four mock workers take 23 ms a step. Long streams run when one worker is stopped, and new requests of
20 tokens arrive all the time. The load continues after SIGCONT until the resumed worker has answered. Then
twice the capacity of workers with four slots each is offered for `--overload` seconds. No worker may
be ejected then.
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
from load import vocabulary
from processes import deployment_of, metric, ready, wait_ready
from servers import Server, start_ours
from streams import LoopLag, Stream, StreamClient, now, percentiles_ms
from targets import Targets

from dynamo.runtime.deployment import ProcessRecord

PROMPT, SHORT, WORKERS, STEP_S = 64, 20, 4, 0.023
BEFORE_S, AFTER_S, GOOD_S = 3.0, 5.0, 2.0
TIMING = ("--timing", "constant:0.015,23")
EJECTION_METRICS = ("dynamo_workers_ejected_total", "dynamo_workers_frozen_total")


async def send_evenly(
    client: StreamClient, keys: itertools.count[int], rate: float, duration_s: float
) -> Sequence[Stream]:
    """Send short requests at equal intervals and return all their streams."""
    started, tasks = now(), list[asyncio.Task[Stream]]()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * duration_s)):
            await asyncio.sleep(max(0.0, started + number / rate - now()))
            key = next(keys)
            tasks.append(
                group.create_task(client.send(key, client.encode_request(key, PROMPT, SHORT)))
            )
        await asyncio.sleep(max(0.0, started + duration_s - now()))
    return [task.result() for task in tasks]


async def freeze_worker(
    args: argparse.Namespace, url: str, victim: ProcessRecord
) -> dict[str, Any]:
    """Stop and resume a worker, and return what clients noticed."""
    whole_s = BEFORE_S + args.seconds + AFTER_S
    tokens = round(whole_s / STEP_S)
    keys = itertools.count()
    client = StreamClient(url, vocabulary(args.model), hung_s=2 * whole_s + 60)
    async with LoopLag() as lag, asyncio.TaskGroup() as group:
        streams = []
        for key in itertools.islice(keys, args.streams):
            request = client.encode_request(key, PROMPT, tokens)
            streams.append(group.create_task(client.send(key, request)))
        await asyncio.sleep(BEFORE_S)
        started = now()
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            new = await send_evenly(client, keys, args.rate, args.seconds)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        thawed = now()
        after = await send_evenly(client, keys, args.rate, AFTER_S)
    old = [task.result() for task in streams]
    stuck = [stream for stream in old if stream.worker == victim.instance]
    answered = [stream for stream in after if stream.worker == victim.instance and stream.times]
    again = [stream.times[0] - thawed for stream in answered]
    errors = [stream.error for stream in (*old, *new, *after) if stream.error]
    return {
        "streams": len(old),
        "stuck": len(stuck),
        "stuck_gap_ms": percentiles_ms([stream.longest_gap(started, thawed) for stream in stuck]),
        "others_gap_ms": percentiles_ms(
            [stream.longest_gap(started, thawed) for stream in old if stream not in stuck]
        ),
        "streams_not_whole": sum(not stream.is_complete(tokens) for stream in old),
        "new": len(new),
        "new_in_time": sum(
            stream.is_complete(SHORT) and stream.ended - stream.started <= GOOD_S for stream in new
        ),
        "new_ms": percentiles_ms([stream.ended - stream.started for stream in new]),
        "after": len(after),
        "after_whole": sum(stream.is_complete(SHORT) for stream in after),
        "after_by_the_thawed": len(again),
        "thawed_answers_after_s": round(min(again), 2) if again else None,
        "errors": dict(Counter(errors).most_common(5)),
        "client_late_ms": lag.percentiles(),
    }


async def overload_twice(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Offer twice the capacity and return the outcome with the number of ejections."""
    client, keys = StreamClient(server.url, vocabulary(args.model)), itertools.count()
    rate = 2 * await overload.capacity(client, keys)
    streams = await overload.offer(client, keys, rate, args.overload)
    outcome = overload.outcome(streams, float("inf"), args.overload)
    ejections = {name: metric(server, name) for name in EJECTION_METRICS}
    return {name: outcome[name] for name in ("offered", "rejected", "failed", "errors")} | ejections


def make_targets(frozen: dict[str, Any], twice: dict[str, Any]) -> Targets:
    """Return the targets."""
    targets = Targets()
    targets.at_most("longest gap of a stuck stream", frozen["stuck_gap_ms"]["max"], 2100, " ms")
    targets.at_least("new requests complete within 2 s", frozen["new_in_time"], frozen["new"])
    targets.at_most("errors", sum(frozen["errors"].values()), 0)
    targets.at_most("incomplete streams", frozen["streams_not_whole"], 0)
    targets.at_least("answered by the resumed worker", frozen["after_by_the_thawed"], 1)
    targets.at_most("failed at twice the capacity", twice["failed"], 0)
    targets.at_most(
        "workers ejected at twice the capacity", sum(twice[n] for n in EJECTION_METRICS), 0
    )
    return targets


def main() -> None:
    """Run both experiments and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument(
        "--seconds",
        type=float,
        default=4,
        help="duration of the freeze; the supervisor replaces a worker after 5",
    )
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4, help="new requests a second")
    parser.add_argument("--overload", type=float, default=20, help="seconds of twice the capacity")
    parser.add_argument("--router-mode", default="round_robin")
    args = parser.parse_args()
    server = start_ours(args.model, WORKERS, 1, args.router_mode, *TIMING)
    try:
        deployment = deployment_of(server)
        wait_ready(deployment, "worker", WORKERS)
        result = {
            "frozen": uvloop.run(freeze_worker(args, server.url, ready(deployment, "worker")[0]))
        }
    finally:
        server.stop()
    server = overload.start(args.model, args.router_mode)
    try:
        result["twice"] = uvloop.run(overload_twice(args, server))
    finally:
        server.stop()
    make_targets(**result).print_report(
        result, f"{args.seconds:g} s frozen, mode {args.router_mode}"
    )


if __name__ == "__main__":
    main()
