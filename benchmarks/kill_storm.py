#!/usr/bin/env python3
"""Kill workers repeatedly under streams and measure what clients notice.

    benchmarks/kill_storm.py [--duration 120] [--planes tcp|etcd-nats] [--routers N] [--model DIR]
    benchmarks/kill_storm.py --prefill-workers 4 --decode-workers 4 --prompt 3000 [--disagg MODE]

A closed loop runs `--streams` streams. Every `--every` seconds one of four mock workers (23 ms a step)
is killed with SIGKILL; with `--routers`, every 12 s also a router process (mode kv). Each request first
runs without faults, and every text of the storm is compared with that reference. With prefill and
decode workers (mode kv), the kind of the killed worker alternates.

A stream is hit by a kill if the killed worker answered its first token. Streams that were moved before
are not counted again, since clients do not see where they went. Gaps are times without text.
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
from load import vocabulary
from processes import PLANES, Kill, Killer, deployment_of, planes, wait_ready
from servers import start_ours
from streams import LoopLag, Stream, StreamClient, difference, now, percentiles_ms
from targets import Targets

APART_S = 4.0
ROUTER_EVERY_S = 12.0


async def run_closed_loop(
    client: StreamClient,
    requests: Sequence[bytes],
    keys: Iterable[int],
    streams: int,
    until: float = math.inf,
) -> list[Stream]:
    """Run `streams` streams at a time until the keys or the time are used up. Starts are spread, so
    that kills hit streams at any position."""
    streams_done: list[Stream] = []
    left = iter(keys)

    async def slot(number: int) -> None:
        await asyncio.sleep(number / streams * APART_S)
        for key in left:
            streams_done.append(await client.send(key, requests[key]))
            if streams_done[-1].error:
                await asyncio.sleep(0.2)
            if now() >= until:
                return

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(slot(number))
    return streams_done


def counts(
    streams_done: Sequence[Stream], reference: dict[int, Stream], tokens: int
) -> dict[str, Any]:
    """Count how the answers ended and how their texts differ from the reference."""
    total, changed, errors = Counter[str](), Counter[str](), Counter[str]()
    for stream in streams_done:
        if stream.error:
            total["hung" if stream.error == "hung" else "failed"] += 1
            errors[f"after {len(stream.pieces)} pieces: {stream.error}"] += 1
            continue
        total["ok" if stream.is_complete(tokens) else "miscounted"] += 1
        changed += difference(reference[stream.key].pieces, stream.pieces)
    return {
        "requests": len(streams_done),
        **{name: total[name] for name in ("ok", "failed", "hung", "miscounted")},
        **{name: changed[name] for name in ("lost", "doubled", "altered")},
        "errors": dict(errors.most_common(8)),
    }


def gaps(streams_done: Sequence[Stream], kills: Sequence[Kill]) -> dict[str, Any]:
    """Return the longest gap around each kill, for streams that were hit and for the others."""
    hit: list[float] = []
    others: list[float] = []
    moved: set[Stream] = set()
    for kill in kills:
        for stream in streams_done:
            if stream.error or not stream.times or not stream.times[0] < kill.at < stream.times[-1]:
                continue
            if stream in moved:
                continue
            if stream.worker == kill.instance:
                moved.add(stream)
                hit.append(stream.longest_gap(kill.at))
            else:
                others.append(stream.longest_gap(kill.at))
    return {"hit_gap_ms": percentiles_ms(hit), "others_gap_ms": percentiles_ms(others)}


async def storm(args: argparse.Namespace, url: str, killers: Sequence[Killer]) -> dict[str, Any]:
    """Run the reference, then the storm, and return the result."""
    client = StreamClient(url, vocabulary(args.model))
    requests = [
        client.encode_request(key, args.prompt, args.tokens) for key in range(2 * args.streams)
    ]
    whole = await run_closed_loop(client, requests, range(len(requests)), args.streams)
    reference = {stream.key: stream for stream in whole if stream.is_complete(args.tokens)}
    if len(reference) < len(requests):
        raise SystemExit(f"undisturbed, {len(requests) - len(reference)} requests failed")
    for killer in killers:
        killer.start()
    endless = itertools.cycle(range(len(requests)))
    async with LoopLag() as lag:
        streams_done = await run_closed_loop(
            client, requests, endless, args.streams, now() + args.duration
        )
    for killer in killers:
        killer.stop()
    return {
        **counts(streams_done, reference, args.tokens),
        "kills": {killer.name: len(killer.kills) for killer in killers},
        "workers_at_kill": dict(Counter(kill.ready for kill in killers[0].kills)),
        **gaps(streams_done, killers[0].kills),
        "first_ms": percentiles_ms([stream.first_s for stream in streams_done if stream.times]),
        "client_late_ms": lag.percentiles(),
    }


def make_targets(result: dict[str, Any], *, disaggregated: bool) -> Targets:
    """Return the targets."""
    p50_ms, p99_ms = (200, 600) if disaggregated else (150, 400)
    targets = Targets()
    for name in ("failed", "hung", "miscounted", "lost", "doubled", "altered"):
        targets.at_most(name, result[name], 0)
    hit = result["hit_gap_ms"]
    if hit["n"]:
        targets.at_most("longest gap of a hit stream, p50", hit["p50"], p50_ms, " ms")
        targets.at_most("longest gap of a hit stream, p99", hit["p99"], p99_ms, " ms")
    return targets


def main() -> None:
    """Start the deployment, run the storm and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--duration", type=float, default=120)
    parser.add_argument("--every", type=float, default=5, help="seconds between kills of a worker")
    parser.add_argument("--planes", choices=PLANES, default="tcp")
    parser.add_argument("--routers", type=int, default=0, help="router processes, mode kv")
    parser.add_argument("--router-mode", default="", help="default: round_robin, kv with --routers")
    parser.add_argument("--workers", type=int, default=4, help="workers that do both")
    parser.add_argument("--prefill-workers", type=int, default=0)
    parser.add_argument("--decode-workers", type=int, default=0)
    parser.add_argument("--disagg", default="always", help="with prefill workers")
    parser.add_argument("--prompt", type=int, default=64, help="words of a prompt")
    parser.add_argument("--streams", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    disaggregated = args.prefill_workers > 0
    mode = args.router_mode or ("kv" if args.routers or disaggregated else "round_robin")
    by_role = {"worker": 0 if disaggregated else args.workers}
    more = ["--timing", "constant:0.015,23", "--router-replicas", str(args.routers)]
    if disaggregated:
        by_role = {"prefill_worker": args.prefill_workers, "decode_worker": args.decode_workers}
        more += ["--prefill-workers", str(args.prefill_workers), "--disagg", args.disagg]
        more += ["--decode-workers", str(args.decode_workers)]
    with planes(args.planes) as flags:
        server = start_ours(args.model, by_role.get("worker", 0), 1, mode, *more, *flags)
        try:
            deployment = deployment_of(server)
            killers = [Killer(deployment, tuple(by_role), args.every, 1)]
            for role, count in by_role.items():
                wait_ready(deployment, role, count)
            if args.routers:
                killers.append(Killer(deployment, ("router",), ROUTER_EVERY_S, 0))
                wait_ready(deployment, "router", args.routers)
            result = uvloop.run(storm(args, server.url, killers))
        finally:
            server.stop()
    title = f"{args.streams} streams, planes {args.planes}, mode {mode}, {args.routers} routers"
    make_targets(result, disaggregated=disaggregated).print_report(result, title)


if __name__ == "__main__":
    main()
