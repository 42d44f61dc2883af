#!/usr/bin/env python3
"""Memory of the frontend: idle, after 20,000 requests, after 100,000.

benchmarks/memory.py [--model MODEL_DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from load import rss_mb
from servers import start_ours

HERE = Path(__file__).parent


def main() -> None:
    """Start, load twice, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    args = parser.parse_args()
    server = start_ours(args.model, 4, 1_000_000, "round_robin")
    resident = lambda: {pid: round(rss_mb(pid), 2) for pid in server.frontend}  # noqa: E731
    try:
        time.sleep(2)
        print("idle", resident(), flush=True)
        for requests in (20_000, 80_000):
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
                "-c",
                "64",
                "--isl",
                "128",
                "--osl",
                "4",
                "--requests",
                str(requests),
                "--seed",
                str(requests),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            time.sleep(2)
            print("after", requests, "more", resident(), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
