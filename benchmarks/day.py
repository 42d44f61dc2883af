#!/usr/bin/env python3
"""Simulated hours of a deployment whose workers crash and whose network breaks.

    benchmarks/day.py [--hours 24] [--workers 100] [--rate 2] [--prompt 1024] [--answer 128]
                      [--deadline 10] [--crash-every 5] [--partition-every 1] [--mode kv] [--seed 0]
                      [--minutes N]

Under virtual time, over memory planes: the runtimes, workers, event and request planes, watch,
health, admission, migration, router and index that serve. Every token of every answer is compared
with what it should be; at the end no block, request or record may be left, and the index must equal
the engines' caches. Says how it goes every virtual hour (stderr), and prints one JSON object. Exit
code 1: fewer than 99.9 % answered right within the deadline, or something leaked.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from math import inf

import msgspec

from dynamo.testing.chaos import ChaosScenario, run_chaos
from dynamo.testing.chaos.faults import FaultSchedule, SimulatedWorkers
from dynamo.testing.chaos.requests import SimulatedOutcome

BAR = 0.999


def tell(hours: float, tally: SimulatedOutcome, fleet: SimulatedWorkers, until: float) -> bool:
    """One line. False: no time is left. Workers that died are objects in circles, too old by then
    for any collection but a full one, which the thresholds put off for good: it is made here."""
    gc.collect()
    wrong = sum(tally.failed.values())
    print(
        f"{hours:5.1f} h  {tally.requests:7d} requests, {wrong} not right; "
        f"{fleet.crashes} crashes, {fleet.partitions} partitions",
        file=sys.stderr,
        flush=True,
    )
    return time.monotonic() < until


def main() -> int:
    """Run, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    plain = ChaosScenario()
    parser.add_argument("--hours", type=float, default=plain.hours)
    parser.add_argument("--workers", type=int, default=plain.workers)
    parser.add_argument("--rate", type=float, default=plain.rate, help="requests a second")
    parser.add_argument("--prompt", type=int, default=plain.prompt_tokens, help="tokens")
    parser.add_argument("--answer", type=int, default=plain.answer_tokens, help="tokens")
    parser.add_argument("--deadline", type=float, default=plain.deadline_s, help="seconds")
    parser.add_argument("--crash-every", type=float, default=5.0, help="hours, of each worker")
    parser.add_argument("--partition-every", type=float, default=1.0, help="hours")
    parser.add_argument("--mode", default=plain.mode, help="the router's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=inf, help="end the day after so many")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    gc.set_threshold(100_000, 20, 50)
    until = time.monotonic() + asked.minutes * 60
    result = run_chaos(
        ChaosScenario(
            hours=asked.hours,
            workers=asked.workers,
            rate=asked.rate,
            prompt_tokens=asked.prompt,
            answer_tokens=asked.answer,
            deadline_s=asked.deadline,
            mode=asked.mode,
            faults=FaultSchedule(asked.crash_every * 3600, asked.partition_every * 3600),
            seed=asked.seed,
        ),
        lambda hours, tally, fleet: tell(hours, tally, fleet, until),
    )
    print(json.dumps(msgspec.to_builtins(result)))
    return 0 if result.correct_share >= BAR and not result.leaks else 1


if __name__ == "__main__":
    sys.exit(main())
