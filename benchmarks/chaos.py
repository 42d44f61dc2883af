#!/usr/bin/env python3
"""Simulate hours of a deployment whose workers crash and whose network is partitioned.

    benchmarks/chaos.py [--hours 24] [--workers 100] [--rate 2] [--prompt 1024] [--answer 128]
                        [--deadline 10] [--crash-every 5] [--partition-every 1] [--mode kv] [--seed 0]
                        [--prefill-workers N] [--disagg MODE] [--minutes N]

Runs the production runtimes, workers, event and request planes, failure detector, health, admission,
migration, router and index in virtual time over memory planes. Every token of every answer is
compared with the expected one. At the end no block, request or record may be left, and the index must
equal the engines' caches. Prints progress every virtual hour (stderr) and one JSON object. Exits with
1 if fewer than 99.9 % of answers are correct within the deadline, or if something leaked.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from math import inf
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.simulation.chaos import ChaosScenario, run_chaos
from tests.simulation.chaos.faults import FaultSchedule, SimulatedWorkers
from tests.simulation.chaos.requests import SimulatedOutcome

MIN_CORRECT_SHARE = 0.999


def print_progress(
    hours: float, outcome: SimulatedOutcome, workers: SimulatedWorkers, deadline: float
) -> bool:
    """Print a progress line. Returns False after the deadline. Dead workers are reference cycles in
    the oldest generation, which the thresholds never collect; this function collects them."""
    gc.collect()
    failed = sum(outcome.failed.values())
    print(
        f"{hours:5.1f} h  {outcome.requests:7d} requests, {failed} failed; "
        f"{workers.crashes} crashes, {workers.partitions} partitions",
        file=sys.stderr,
        flush=True,
    )
    return time.monotonic() < deadline


def main() -> int:
    """Run the simulation and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = ChaosScenario()
    parser.add_argument("--hours", type=float, default=defaults.hours)
    parser.add_argument("--workers", type=int, default=defaults.workers)
    parser.add_argument("--rate", type=float, default=defaults.rate, help="requests per second")
    parser.add_argument("--prompt", type=int, default=defaults.prompt_tokens, help="tokens")
    parser.add_argument("--answer", type=int, default=defaults.answer_tokens, help="tokens")
    parser.add_argument("--deadline", type=float, default=defaults.deadline_s, help="seconds")
    parser.add_argument(
        "--crash-every", type=float, default=5.0, help="mean hours between crashes of a worker"
    )
    parser.add_argument("--partition-every", type=float, default=1.0, help="hours")
    parser.add_argument("--mode", default=defaults.mode, help="router mode")
    parser.add_argument(
        "--prefill-workers", type=int, default=0, help="workers that only compute prompts"
    )
    parser.add_argument("--disagg", default=defaults.disaggregation, help="as of `dynamo run`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=inf, help="end after this wall time")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    gc.set_threshold(100_000, 20, 50)
    deadline = time.monotonic() + args.minutes * 60
    result = run_chaos(
        ChaosScenario(
            hours=args.hours,
            workers=args.workers,
            rate=args.rate,
            prompt_tokens=args.prompt,
            answer_tokens=args.answer,
            deadline_s=args.deadline,
            mode=args.mode,
            prefill_workers=args.prefill_workers,
            disaggregation=args.disagg,
            faults=FaultSchedule(args.crash_every * 3600, args.partition_every * 3600),
            seed=args.seed,
        ),
        lambda hours, outcome, workers: print_progress(hours, outcome, workers, deadline),
    )
    print(json.dumps(msgspec.to_builtins(result)))
    return 0 if result.correct_share >= MIN_CORRECT_SHARE and not result.leaks else 1


if __name__ == "__main__":
    sys.exit(main())
