#!/usr/bin/env python3
"""P99 of short requests: 64 in, 8 out, 20 a second (Poisson), least_loaded over 4 mock workers.

    benchmarks/short_requests.py --model MODEL_DIR [--duration 30]

Also prints the pauses of the frontend's event loop (garbage collection included) from /metrics.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from servers import start_ours

HERE = Path(__file__).parent


def main() -> None:
    """Start, load, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--duration", type=float, default=30)
    args = parser.parse_args()
    server = start_ours(20200, args.model, 4, 1, "least_loaded")
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
            pauses = [
                x for x in answer.read().decode().splitlines() if "loop_pause" in x and x[0] != "#"
            ]
    finally:
        server.stop()
    print(json.dumps({k: result[k] for k in ("requests", "errors", "ttft_ms", "e2e_ms")}))
    print("\n".join(pauses))


if __name__ == "__main__":
    main()
