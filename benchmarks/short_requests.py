#!/usr/bin/env python3
"""Measure the p99 of short requests: 64 in, 8 out, 20 per second (Poisson), least_loaded, 4 mock workers.

    benchmarks/short_requests.py [--model MODEL_DIR] [--duration 30]

Also prints the lag of the frontend's event loop from /metrics, garbage collection included.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from servers import start_ours

HERE = Path(__file__).parent


def histogram(metrics: str, name: str) -> list[tuple[float, int]]:
    """Return (upper bound, cumulative count) of a Prometheus histogram without labels."""
    matches = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$', metrics, re.MULTILINE)
    return [(float(bound), int(float(count))) for bound, count in matches]


def quantile(buckets: list[tuple[float, int]], share: float) -> float:
    """Interpolate like Prometheus' histogram_quantile: linear in a bucket, the last bound beyond
    all."""
    rank = share * buckets[-1][1]
    low, below = 0.0, 0
    for bound, count in buckets:
        if count >= rank and count > below:
            return (
                low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
            )
        low, below = (low if bound == math.inf else bound), count
    return low


def main() -> None:
    """Start a deployment, run the load and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--duration", type=float, default=30)
    args = parser.parse_args()
    server = start_ours(args.model, 4, 1, "least_loaded")
    try:
        command = [
            sys.executable,
            str(HERE / "load.py"),
            "--url",
            server.url,
            "--model",
            "smol",
            "--vocabulary",
            args.model,
        ]
        command += [
            "--rate",
            "20",
            "--isl",
            "64",
            "--osl",
            "8",
            "--duration",
            str(args.duration),
            "--warmup",
            "10",
        ]
        result = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        with urllib.request.urlopen(server.url + "/metrics") as answer:
            pauses = histogram(answer.read().decode(), "dynamo_runtime_loop_pause_seconds")
    finally:
        server.stop()
    print(json.dumps({k: result[k] for k in ("requests", "errors", "ttft_ms", "e2e_ms")}))
    shares = (0.5, 0.99, 0.999)
    print(
        json.dumps(
            {f"loop_pause_ms_p{q * 100:g}": round(quantile(pauses, q) * 1000, 2) for q in shares}
        )
    )


if __name__ == "__main__":
    main()
