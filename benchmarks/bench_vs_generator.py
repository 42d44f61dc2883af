#!/usr/bin/env python3
"""Compare `dynamo bench` with another load generator: the same load on the same server, in turns.

    benchmarks/bench_vs_generator.py --generator loadgen.py [--rounds 5]

The other generator is a script with the flags --url --model -c --isl --osl --requests --warmup
--ignore-eos --rate --duration --seed --quiet --out FILE. Its output has `ttft_ms` and `itl_ms` ("mean",
"p50", ...). Every run has a new seed, since prompts that are cached from the run before answer
sooner.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from servers import start_ours

LOADS = (
    ("1 stream, real time", 1, ("-c", "1", "--requests", "40", "--warmup", "2")),
    ("16 streams, real time", 1, ("-c", "16", "--requests", "480", "--warmup", "16")),
    ("64 streams, real time", 1, ("-c", "64", "--requests", "1280", "--warmup", "64")),
    ("20 requests a second", 1, ("--rate", "20", "--duration", "15", "--warmup", "16")),
    ("256 streams, saturated", 100, ("-c", "256", "--requests", "4000", "--warmup", "256")),
)
"""Name, how much faster than real time the engines are, flags of both."""
FIGURES = [(name, at) for name in ("ttft_ms", "itl_ms") for at in ("mean", "p50")]
SHAPE = ("--isl", "128", "--osl", "64")


def run_generator(script: str, url: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Run the other generator and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        seed = str(random.randrange(1 << 30))
        command = [sys.executable, script, "--url", url, "--model", "default", "--ignore-eos"]
        command += [*SHAPE, *flags, "--seed", seed, "--quiet", "--out", str(out)]
        subprocess.run(command, check=True)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def run_bench(url: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Run `dynamo bench` and return its result."""
    command = [sys.executable, "-m", "dynamo", "bench", url, *SHAPE, *flags, "--json"]
    completed = subprocess.run(command, capture_output=True, check=True)
    result: dict[str, Any] = json.loads(completed.stdout)
    return result


def main() -> None:
    """Measure each load and print a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generator", required=True, help="script of the other generator")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name, speedup, flags in LOADS:
        server = start_ours("", 2, speedup, "round_robin")
        try:
            runs = [
                (run_generator(args.generator, server.url, flags), run_bench(server.url, flags))
                for _ in range(args.rounds)
            ]
        finally:
            server.stop()
        parts = []
        for figure, at in FIGURES:
            other, own = (median(run[side][figure][at] for run in runs) for side in (0, 1))
            change = f" ({own / other - 1:+.1%})" if other else ""
            parts.append(f"{figure} {at} {other:.2f} / {own:.2f}{change}")
        cpu = [run[1]["processes"] for run in runs]
        bench, front = (
            median(processes[role]["us_per_token"] for processes in cpu)
            for role in ("bench", "frontend")
        )
        print(
            f"{name}: {'; '.join(parts)}; cpu a token: bench {bench} us, frontend {front} us "
            f"({bench / front:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
