#!/usr/bin/env python3
"""Measure the resident memory of every process of a deployment with mock workers at full speed.

    benchmarks/memory.py [--case short|short-kv|prompts|router|long] [--model MODEL_DIR] [--warmup 2000]

- short: 50,000 distinct requests of 64 prompt and 4 output tokens, round robin.
- short-kv: the same in mode kv.
- prompts: 12,000 distinct prompts of 4,096 tokens, 1 output token, mode kv.
- router: 30,000 short requests in mode kv with a router process.
- long: 100,000 requests of 128 prompt tokens, round robin.
- responses: 20,000 stored answers of /v1/responses.

`--warmup` short requests run before each case. Growth is the memory after the load and two idle
seconds minus the memory after the warm-up. Exits with 1 if the frontend grows by more than its limit
(short and responses 10 MB, prompts 30 MB).
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
    """A load. `limit_mb` is the limit of the frontend's growth, 0 for none."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    router: str
    limit_mb: float = 0.0
    more: tuple[str, ...] = ()
    load: tuple[str, ...] = ()


CASES = {
    "short": Case(50_000, 64, 4, "round_robin", 10.0),
    "short-kv": Case(50_000, 64, 4, "kv"),
    "prompts": Case(12_000, 4_096, 1, "kv", 30.0),
    "router": Case(30_000, 64, 4, "kv", more=("--router-replicas", "1")),
    "long": Case(100_000, 128, 4, "round_robin"),
    "responses": Case(20_000, 64, 4, "round_robin", 10.0, load=("--responses",)),
}


def send_requests(url: str, vocabulary: str, requests: int, case: Case, seed: int) -> None:
    """Send the requests in a closed loop of 32."""
    command = [sys.executable, str(HERE / "load.py"), "--url", url, "--model", "smol"]
    command += ["--vocabulary", vocabulary, "-c", "32", "--requests", str(requests)]
    command += ["--isl", str(case.prompt_tokens), "--osl", str(case.answer_tokens)]
    done = subprocess.run(
        [*command, *case.load, "--seed", str(seed)], check=True, stdout=subprocess.PIPE, text=True
    )
    if errors := json.loads(done.stdout)["errors"]:
        sys.exit(f"requests failed: {errors}")


def resident(pids: dict[str, list[int]]) -> dict[str, float]:
    """Return the MB of the largest process of each role."""
    time.sleep(2)
    return {role: round(max(map(rss_mb, role_pids)), 1) for role, role_pids in pids.items()}


def measure(name: str, model: str, warmup: int) -> bool:
    """Run a case. Returns True if the frontend stayed within its limit."""
    case = CASES[name]
    server = start_ours(model, 4, 1_000_000, case.router, *case.more)
    try:
        pids = processes(server.url)
        print(f"{name}: idle {resident(pids)}", flush=True)
        send_requests(server.url, model, warmup, CASES["short"], 1)
        before = now = resident(pids)
        print(f"  after {warmup} short requests {before}", flush=True)
        for portion in range(1, PORTIONS + 1):
            send_requests(server.url, model, case.requests // PORTIONS, case, 1 + portion)
            now = resident(pids)
            print(f"  {case.requests * portion // PORTIONS} more {now}", flush=True)
    finally:
        server.stop()
    grown = {role: round(now[role] - before[role], 1) for role in now}
    print(f"  growth {grown} MB", flush=True)
    return not case.limit_mb or grown["frontend"] <= case.limit_mb


def main() -> int:
    """Run the cases and print their memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--warmup", type=int, default=2_000)
    args = parser.parse_args()
    within = [measure(name, args.model, args.warmup) for name in args.case or CASES]
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
