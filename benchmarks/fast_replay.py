#!/usr/bin/env python3
"""Compare the fast replay with the exact one, or measure it on a large cluster.

    benchmarks/fast_replay.py TRACE [REPLAY FLAGS]           both replays of one trace
    benchmarks/fast_replay.py --large [REPLAY FLAGS]         1,000 workers, an hour, 1.5 million requests

Prints CPU time and the differences of means, p50, p99 and reuse.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from dynamo.cli.entry import main as dynamo

STATISTICS = ("mean", "p50", "p99")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
LARGE = (
    "--synthetic", "isl=3000,osl=300,requests=1530000,rate=425", "--workers", "1000", "--fast",
)  # fmt: skip


def replay(*arguments: str) -> dict[str, Any]:
    """Return the result of `dynamo replay` with these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        dynamo(["replay", *arguments, "--json", str(path)])
        result: dict[str, Any] = json.loads(path.read_bytes())
        return result


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--large"]:
        result = replay(*LARGE, *sys.argv[2:])
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{result['requests']} requests: {result['cpu_s']} s of CPU, {mib:.0f} MiB")
        return
    exact, fast = replay(*sys.argv[1:]), replay(*sys.argv[1:], "--fast")
    for name in ("completed", "preemptions", "evictions", "reuse_first_admission", "cpu_s"):
        print(f"{name:22} {exact[name]:12.6g} {fast[name]:12.6g}")
    for name in LATENCIES:
        for statistic in STATISTICS:
            was, now = exact[name][statistic], fast[name][statistic]
            difference = now / was - 1 if was else 0.0
            print(f"{name + ' ' + statistic:22} {was:12.6g} {now:12.6g} {difference:+8.2%}")


if __name__ == "__main__":
    main()
