#!/usr/bin/env python3
"""Compare the books of `dynamo slo` with the count of the clients after a simulated day with faults.

    benchmarks/slo_day.py [--hours 24] [--rate 0.5] [--burst 30] [--seed 0]

Frontends answer HTTP without sockets, in virtual time, with their application, stories and publishers.
Workers crash and are cut off, frontends are replaced and lose events, the observer is killed about once
an hour. The last minute of each hour brings more requests than the workers can answer. The target is a
difference of at most 0.01 % of the requests.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
from pathlib import Path

import msgspec
from targets import Targets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.simulation.slo_day import SloDay, run_slo_day


def main() -> None:
    """Run the day, and check the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    day = SloDay()
    parser.add_argument("--hours", type=float, default=day.hours)
    parser.add_argument("--rate", type=float, default=day.rate)
    parser.add_argument("--burst", type=float, default=day.burst)
    parser.add_argument("--seed", type=int, default=day.seed)
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    gc.set_threshold(100_000, 20, 50)
    with tempfile.TemporaryDirectory() as folder:
        result = run_slo_day(
            msgspec.structs.replace(day, **vars(args)), Path(folder) / "slo.sqlite"
        )
    targets = Targets()
    for name, ours, theirs in zip(
        ("requests", "failed", "late"), result.report, result.clients, strict=True
    ):
        differing = abs(ours - theirs) / max(1, result.clients[0]) * 100
        targets.at_most(f"{name} in the books and at the clients", differing, 0.01, " %")
    targets.print_report(msgspec.to_builtins(result), "service level objective")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
