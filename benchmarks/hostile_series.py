#!/usr/bin/env python3
"""Count the series of metrics after 1,000 and after 100,000 hostile requests, and what a scrape costs.

    benchmarks/hostile_series.py --model MODEL_DIR [--requests 100000] [--promtool PATH]

Each request has a path, model, ids, fields and trace headers of its own. There may be not one series more
than after 1,000. A scrape may take 2 ms of the frontend's CPU, since no stream waits longer for it.
With --promtool, the text of each role must be without faults.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from load import cpu_seconds
from targets import Targets

sys.path.insert(0, str(Path(__file__).parents[1]))  # from here on, for tests
from tests.attacks.hostile_series import count_series, send_hostile
from tests.faults.cluster import Cluster

SCRAPES = 200


async def run(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Targets]:
    """Send the requests, and return the result and the targets."""
    targets = Targets()
    flags = ("--observer", "--no-log-requests")
    with Cluster(Path(args.model), folder, workers=1, flags=flags) as cluster:
        answered = await send_hostile(cluster.port, "tiny", 1_000, 0)
        await asyncio.sleep(2)
        before = count_series(cluster)
        answered += await send_hostile(cluster.port, "tiny", args.requests - 1_000, 1)
        await asyncio.sleep(2)
        result = {"answered": answered, "before": before, "after": count_series(cluster)}
        frontend = cluster.ready("frontend")[0]
        began_s = cpu_seconds(frontend.pid)
        for _ in range(SCRAPES):
            with urllib.request.urlopen(f"{frontend.status_url}/metrics") as page:
                text = page.read()
        scrape_ms = (cpu_seconds(frontend.pid) - began_s) / SCRAPES * 1e3
        result |= {"scrape_cpu_ms": scrape_ms, "bytes": len(text)}
        for role in ("frontend", "observer", "worker") if args.promtool else ():
            with urllib.request.urlopen(f"{cluster.ready(role)[0].status_url}/metrics") as page:
                text = page.read()
            check = subprocess.run(
                (args.promtool, "check", "metrics"), input=text, capture_output=True, check=False
            )
            result[f"promtool_{role}"] = check.stderr.decode()
            targets.at_most(f"promtool, {role}", check.returncode, 0)
    targets.at_least("answered", result["answered"] / args.requests, 0.99)
    targets.at_most("series after all", result["after"], result["before"])
    targets.at_most("CPU of a scrape", scrape_ms, 2.0, " ms")
    return result, targets


def main() -> None:
    """Run, and check the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--promtool", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result, targets = asyncio.run(run(args, Path(folder)))
    targets.print_report(result, "hostile requests")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
