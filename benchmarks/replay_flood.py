#!/usr/bin/env python3
"""Measure the memory of router and workers in an hour of prompts without common prefixes.

    benchmarks/replay_flood.py [--minutes N] [--rate R] [--mode kv] [--workers N]

The real index, worker states and block pools run in virtual time. Prints the resident memory of the
process twelve times.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

from dynamo.core.settings.schema_router import RouterSettings as RouterSettings
from dynamo.core.timing.model import DYNAMO_TIMING
from dynamo.core.values import EngineInfo
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers

BLOCK_TOKENS = 64
PROMPT_TOKENS = 4_000
ANSWER_TOKENS = 50
PARTS = 12


def flood(minutes: float, rate: float) -> Iterator[TraceConversation]:
    """Yield one conversation with a unique prompt after the other."""
    for row in range(round(minutes * 60 * rate)):
        yield TraceConversation(row / rate, (TraceRequest(row, PROMPT_TOKENS, ANSWER_TOKENS),))


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    """Run the replay and print the memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=20, help="requests a second")
    parser.add_argument("--mode", default="kv")
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    info = EngineInfo(
        engine="mock",
        block_tokens=BLOCK_TOKENS,
        num_blocks=16_384,
        context_tokens=16_384 * BLOCK_TOKENS,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
    )
    workers = ReplayWorkers([ReplayGroup(args.workers, info, DYNAMO_TIMING)], "reuse")
    plan = ReplayPlan("flood", workers, RouterSettings(mode=args.mode), BLOCK_TOKENS)
    every_s = args.minutes * 60 / PARTS
    reported = [0]

    def tell(log: ReplayLog) -> None:
        if log.clock.now() >= reported[0] * every_s:
            reported[0] += 1
            gc.collect()
            print(
                f"{log.clock.now() / 60:5.1f} min  {log.completed:7d} requests  {resident_mb():6.1f} MB"
            )

    result, log = Replay(plan, tell).run(flood(args.minutes, args.rate))
    print(
        f"      end  {log.completed:7d} requests  {resident_mb():6.1f} MB  cpu {result.cpu_s:.0f} s"
    )


if __name__ == "__main__":
    main()
