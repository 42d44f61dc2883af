#!/usr/bin/env python3
"""Measure what a prefill worker on the same host adds to a request, against one worker that does both.

    benchmarks/prefill_worker.py [--engine native|mock] [--words 1500] [--tokens 16] [--rounds 10]

Two deployments run side by side: one worker, and one prefill with one decode worker (`--disagg always`). Requests
go to one and the other in turns, one at a time, each with a new prompt. Differences are those of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import uvloop
from load import vocabulary
from servers import Server, start_ours
from streams import Stream, StreamClient
from targets import Targets

MAX_ADDED_MS = 50


async def measure(servers: list[Server], args: argparse.Namespace) -> dict[str, Any]:
    """Return medians of both deployments and of the differences, in milliseconds."""
    words = vocabulary(args.model)
    clients = [StreamClient(server.url, words, hung_s=600) for server in servers]
    rows: list[list[tuple[float, float]]] = []
    for key in range(args.rounds + 1):
        order = (0, 1) if key % 2 else (1, 0)
        row: dict[int, Stream] = {}
        for number in order:
            request = clients[number].encode_request(key, args.words, args.tokens)
            row[number] = await clients[number].send(key, request)
            if not row[number].is_complete(args.tokens):
                raise SystemExit(f"a request failed: {row[number].error}")
        if key:  # the first round connects the workers
            times = [(row[at].first_s, row[at].ended - row[at].started) for at in range(2)]
            rows.append(times)
    result = {}
    for at, name in enumerate(("first_token_ms", "whole_ms")):
        alone = [times[0][at] * 1e3 for times in rows]
        apart = [times[1][at] * 1e3 for times in rows]
        added = [b - a for a, b in zip(alone, apart, strict=True)]
        values = (statistics.median(alone), statistics.median(apart), statistics.median(added))
        result[name] = dict(zip(("one", "apart", "added"), map(round, values), strict=True))
    return result


def main() -> None:
    """Start both deployments, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--engine", default="native", choices=("native", "mock"))
    parser.add_argument("--words", type=int, default=1500, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    more = ["--timing", "constant:0.3,10"] if args.engine == "mock" else []
    roles = ("--prefill-workers", "1", "--decode-workers", "1", "--disagg", "always")
    servers: list[Server] = []
    try:
        servers.append(start_ours(args.model, 1, 1, "round_robin", *more, engine=args.engine))
        servers.append(
            start_ours(args.model, 0, 1, "round_robin", *roles, *more, engine=args.engine)
        )
        result = uvloop.run(measure(servers, args))
    finally:
        for server in servers:
            server.stop()
    targets = Targets()
    for name, row in result.items():
        targets.at_most(f"{name}, added", row["added"], MAX_ADDED_MS, " ms")
    targets.print_report(result, f"{args.words} words, {args.engine}, {args.rounds} rounds")


if __name__ == "__main__":
    main()
