#!/usr/bin/env python3
"""Measure KV-aware routing in real time: a multi-turn chat on live deployments, alternating in one run.

    benchmarks/kv_live.py mock   TRACE --model MODEL_DIR --peer-python PEER/bin/python [--rounds 2]
    benchmarks/kv_live.py native [--sessions 6] [--turns 6] [--rounds 2]

- mock: 4 mock workers with Dynamo's timing in mode kv, against Dynamo 1.6.1 with its KV router and
  mocker. TRACE is a Mooncake trace with session_id and delay.
- native: 4 native engines in mode kv against round robin, which returns to a worker only every fourth
  turn.

Prints the mean TTFT (ms) and the cached share of prompt tokens per round, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servers import Server, start_ours, start_peer

REAL_TIME = 1


def measure(server: Server, flags: list[str], seed: int) -> dict[str, float]:
    """Run the load once."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, "-m", "dynamo", "bench", server.url, "--model", "smol", *flags]
        command += ["--seed", str(seed), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return select_metrics(json.loads(out.read_text()))


def select_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that this benchmark compares."""
    return {
        "ttft_ms": round(result["ttft_ms"]["mean"], 1),
        "ttft_p99_ms": round(result["ttft_ms"]["p99"], 1),
        "hit_rate": result["cached_ratio"],
        "failed": result["failed"],
    }


def alternate(starts: dict[str, Callable[[], Server]], flags: list[str], rounds: int) -> None:
    """Measure every server in each round. Each server is fresh, since a warm cache would hide the
    difference."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
    for seed in range(1, rounds + 1):
        for name, start in starts.items():
            server = start()
            try:
                rows[name].append(measure(server, flags, seed))
            finally:
                server.stop()
            print(name, json.dumps(rows[name][-1]), flush=True)
    means = {name: statistics.median(row["ttft_ms"] for row in runs) for name, runs in rows.items()}
    first, *others = means
    for other in others:
        print(f"mean TTFT, {first} over {other}: {means[first] / means[other]:.3f}")


def mock(args: argparse.Namespace) -> None:
    """Compare with Dynamo 1.6.1."""
    starts = {"ours": lambda: start_ours(args.model, 4, REAL_TIME, "kv")}
    if args.peer_python:
        starts["dynamo"] = lambda: start_peer(args.model, args.peer_python, 4, REAL_TIME, "kv")
    flags = ["--trace", args.trace, "--block-tokens", "64", "--tokenizer", args.model]
    alternate(starts, flags, args.rounds)


def native(args: argparse.Namespace) -> None:
    """Compare with round robin."""

    def ours(mode: str) -> Callable[[], Server]:
        return lambda: start_ours("", 4, REAL_TIME, mode, engine="native")

    flags = ["-c", str(args.concurrency), "--turns", str(args.turns), "--isl", str(args.isl)]
    flags += ["--requests", str(args.sessions * args.turns), "--osl", "8"]
    alternate({"kv": ours("kv"), "round_robin": ours("round_robin")}, flags, args.rounds)


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    mock_parser = kinds.add_parser("mock")
    mock_parser.add_argument("trace")
    mock_parser.add_argument(
        "--model", default="", help="tokenizer's folder; default: the default's"
    )
    mock_parser.add_argument("--peer-python", default="")
    mock_parser.set_defaults(run=mock)
    native_parser = kinds.add_parser("native")
    native_parser.add_argument("--sessions", type=int, default=6)
    native_parser.add_argument("--turns", type=int, default=6)
    native_parser.add_argument("--isl", type=int, default=192, help="tokens that a turn adds")
    native_parser.add_argument("--concurrency", type=int, default=2)
    native_parser.set_defaults(run=native)
    for kind in (mock_parser, native_parser):
        kind.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
