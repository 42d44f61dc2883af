#!/usr/bin/env python3
"""Resident memory of every process of a deployment, mock workers at full speed-up.

    benchmarks/memory.py [--case short|short-kv|prompts|router|long] [--model MODEL_DIR] [--warmup 2000]

short: 50,000 distinct requests of 64 tokens, 4 out, in turn; short-kv: the same in mode kv. prompts:
12,000 distinct prompts of 4,096 tokens, 1 out, mode kv. router: 30,000 short ones in mode kv, with a
router of its own. long: 100,000 requests of 128 tokens in turn. Before each, `--warmup` short requests. Growth is what the process has after the
load, two seconds idle, less what it had after the warm-up. Exit code 1: the frontend grew by more
than it may (short 10 MB, prompts 30).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from load import rss_mb
from servers import processes, start_ours

HERE = Path(__file__).parent
PORTIONS = 4


class Case(NamedTuple):
    """`limit_mb`: how far the frontend may grow; 0: any."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    router: str
    limit_mb: float = 0.0
    more: tuple[str, ...] = ()


CASES = {
    "short": Case(50_000, 64, 4, "round_robin", 10.0),
    "short-kv": Case(50_000, 64, 4, "kv"),
    "prompts": Case(12_000, 4_096, 1, "kv", 30.0),
    "router": Case(30_000, 64, 4, "kv", more=("--router-replicas", "1")),
    "long": Case(100_000, 128, 4, "round_robin"),
}


def ask(url: str, vocabulary: str, requests: int, case: Case, seed: int) -> None:
    """A closed loop of 32."""
    command = [sys.executable, str(HERE / "load.py"), "--url", url, "--model", "smol"]
    command += ["--vocabulary", vocabulary, "-c", "32", "--requests", str(requests)]
    command += ["--isl", str(case.prompt_tokens), "--osl", str(case.answer_tokens)]
    done = subprocess.run(
        [*command, "--seed", str(seed)], check=True, stdout=subprocess.PIPE, text=True
    )
    if errors := json.loads(done.stdout)["errors"]:
        sys.exit(f"not all were answered: {errors}")


def resident(pids: dict[str, list[int]]) -> dict[str, float]:
    """MB by role, the largest process of each."""
    time.sleep(2)
    return {role: round(max(map(rss_mb, some)), 1) for role, some in pids.items()}


def measure(name: str, model: str, warmup: int) -> bool:
    """One case; whether the frontend stayed within its limit."""
    case = CASES[name]
    server = start_ours(model, 4, 1_000_000, case.router, *case.more)
    try:
        pids = processes(server.url)
        print(f"{name}: idle {resident(pids)}", flush=True)
        ask(server.url, model, warmup, CASES["short"], 1)
        before = now = resident(pids)
        print(f"  after {warmup} short requests {before}", flush=True)
        for portion in range(1, PORTIONS + 1):
            ask(server.url, model, case.requests // PORTIONS, case, 1 + portion)
            now = resident(pids)
            print(f"  {case.requests * portion // PORTIONS} more {now}", flush=True)
    finally:
        server.stop()
    grown = {role: round(now[role] - before[role], 1) for role in now}
    print(f"  grown by {grown} MB", flush=True)
    return not case.limit_mb or grown["frontend"] <= case.limit_mb


def main() -> int:
    """Start, load, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--warmup", type=int, default=2_000)
    asked = parser.parse_args()
    within = [measure(name, asked.model, asked.warmup) for name in asked.case or CASES]
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
