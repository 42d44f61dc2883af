#!/usr/bin/env python3
"""Compare workers that do both, separate prefill and decode workers, and flexible workers by replay.

    benchmarks/disaggregated_replay.py TRACE... [--seeds N] [--jobs N] [--only WORD] [--itl-slo MS]
                                       [--decisions | --capacity] [--timing TIMING]
                                       [--num-blocks N] [--workers N] [--smear S] [--keep FOLDER]
                                       [--roles]

Each trace is replayed smeared over 3 s at --speeds, the first also unsmeared at 3x. Two synthetic
loads of 3,000 prompt tokens and 150 output tokens follow. --roles replays the traces alone, with
flexible workers also with a target of 25 ms for gaps, against all splits. A trace may be a CSV file
with the columns TIMESTAMP, ContextTokens and GeneratedTokens. Eight workers are replayed as each of
the clusters. `good` is the share of requests with a first token within 2 s and a mean time between
tokens of at most 25 ms. Values are medians over the seeds. Exits with 1 if flexible workers have
less than 0.98 of the good share of the best other cluster. --keep holds results, and those that
exist are not computed again.

--decisions compares the modes of disaggregation of separate workers instead, unsmeared at 1x and
3x. Mode predicted may be 3 % worse than the better of the two others in the first token, the 99th
percentile of the time between tokens and the end-to-end time. Exits with 1 if it is worse.

--capacity searches the highest rates at a 99th percentile of gaps of 25 ms and a 90th percentile of
the first token of 1 s instead. A search takes about ten replays.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

GOOD = "ttft=2s,tpot=25ms"
SYNTHETIC = "isl=3000,osl=150,requests=3000,rate={rate}"
NEVER_WORSE = 0.98
FLEXIBLE = "flexible"
TARGET = "flexible 25 ms"
SPLITS = {
    name: ("--prefill-workers", name[0], "--decode-workers", name[2])
    for name in ("4:4", "5:3", "6:2", "2:6")
}
CLUSTERS = {
    "aggregated": ("--workers", "8"),
    **{name: (*flags, "--disagg", "always") for name, flags in SPLITS.items()},
    FLEXIBLE: ("--flexible-workers", "8"),
    TARGET: ("--flexible-workers", "8", "--itl-slo", "25"),
}
DEFAULT_CLUSTERS = ["aggregated", "4:4", "5:3", "6:2", FLEXIBLE]
ROLES = ["aggregated", "6:2", "4:4", "2:6", FLEXIBLE, TARGET]
PREDICTED = "predicted"
MODES = ("always", "thresholds", PREDICTED)
DECISIONS = {
    f"{name} {mode}": (*SPLITS[name], "--disagg", mode) for name in ("4:4", "6:2") for mode in MODES
}
SAME_SHARE = 1.03
COMPARED = (0, 3, 6)
"""The columns that --decisions compares."""

Results = list[Future[dict[str, Any]]]
"""The results of one row, by seed."""


def loads(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the flags of each load."""
    if args.decisions:
        for speed in ("1", "3"):
            flags = [args.traces[0], "--trace-block-size", str(args.trace_block_size)]
            yield f"{speed}x unsmeared", [*flags, "--speed", speed]
        return
    speeds = ["3"] if args.capacity else args.speeds
    for trace in args.traces:
        name = Path(trace).name.partition(".")[0]
        flags = [trace, "--trace-block-size", str(args.trace_block_size)]
        for speed in speeds:
            yield f"{name} {speed}x", [*flags, "--speed", speed, "--smear", args.smear]
        if trace == args.traces[0] and not (args.capacity or args.roles):
            yield f"{name} 3x unsmeared", [*flags, "--speed", "3"]
    if args.roles:
        return
    for rate in ("70",) if args.capacity else ("40", "80"):
        yield f"3,000/150 {rate}/s", ["--synthetic", SYNTHETIC.format(rate=rate)]


def replay(flags: Sequence[str], out: Path) -> dict[str, Any]:
    """Return the result of a replay, from the file `out` if it exists. Raises `RuntimeError`."""
    if not out.exists():
        words = [sys.executable, "-m", "dynamo", "replay", *flags, "--json", str(out)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if not out.exists():
            raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = msgspec.json.decode(out.read_bytes())
    return result


def figures(result: dict[str, Any]) -> list[float]:
    """Return the values of a row."""
    if "capacity" in result:
        capacity = result["capacity"]
        return [capacity["output_tokens_per_s_per_gpu"], capacity["speed"], result["itl_ms"]["p99"]]
    ttft, itl = result["ttft_ms"], result["itl_ms"]
    tpot = result["tpot_ms"]
    latencies = [ttft["mean"], ttft["p90"], tpot["mean"], tpot["p99"], itl["p99"], itl["p999"]]
    return [*latencies, result["e2e_ms"]["mean"], result["good_share"]]


def columns(args: argparse.Namespace) -> list[str]:
    """Return the names of the values."""
    if args.capacity:
        return ["tokens/s/GPU", "speed", "gaps p99"]
    names = ["TTFT mean", "TTFT p90", "TPOT mean", "TPOT p99", "gaps p99", "gaps p99.9"]
    return [*names, "E2E mean", "good"]


def cluster_flags(name: str, args: argparse.Namespace) -> list[str]:
    """Return the flags of all replays of a cluster."""
    flags = ["--router-mode", "kv", "--eviction", "lru", "--block-size", "64", "--good", GOOD]
    flags += ["--num-blocks", str(args.num_blocks), "--timing", args.timing]
    if args.capacity:
        flags += ["--capacity", f"ttft_p90={args.ttft},itl_p99={args.itl_slo or 25:g}ms"]
    if args.itl_slo and name == FLEXIBLE:
        flags += ["--itl-slo", f"{args.itl_slo:g}"]
    cluster = (DECISIONS if args.decisions else CLUSTERS)[name]
    return [*flags, *(scale(flag, args.workers) for flag in cluster)]


def scale(flag: str, workers: int) -> str:
    """Return a number of workers of a cluster of eight as that of a cluster of `workers`."""
    return str(int(flag) * workers // 8) if len(flag) == 1 else flag


def read_csv(path: str, folder: Path) -> str:
    """Return a trace in Mooncake's format with the rows of a CSV file."""
    if not path.endswith(".csv"):
        return path
    trace = folder / f"{Path(path).stem}.jsonl"
    with Path(path).open(newline="") as source, trace.open("wb") as target:
        rows = list(csv.DictReader(source))
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
        for row, time in zip(rows, times, strict=True):
            request = {
                "timestamp": (time - times[0]).total_seconds() * 1e3,
                "input_length": max(1, int(row["ContextTokens"])),
                "output_length": max(1, int(row["GeneratedTokens"])),
            }
            target.write(msgspec.json.encode(request) + b"\n")
    return str(trace)


def start(
    args: argparse.Namespace, pool: ThreadPoolExecutor, folder: Path
) -> Iterator[tuple[str, str, Results]]:
    """Yield (load, cluster, results) for each row. The replays wait for a place in `pool`."""
    clusters = list(DECISIONS) if args.decisions else args.clusters
    clusters = ROLES if args.roles else clusters
    for load, flags in loads(args):
        for cluster in clusters:
            if args.only in f"{load} {cluster}":
                name = f"{load} {cluster}".replace("/", "_").replace(" ", "_").replace(".", "_")
                words = [*flags, *cluster_flags(cluster, args)]
                yield (
                    load,
                    cluster,
                    [
                        pool.submit(
                            replay, [*words, "--seed", str(seed)], folder / f"{name}.{seed}.json"
                        )
                        for seed in range(args.seeds)
                    ],
                )


def is_worse(rows: dict[str, list[float]], args: argparse.Namespace) -> bool:
    """Whether flexible workers, or mode predicted, miss their limit in the rows of a load."""
    if args.capacity:
        return False
    if not args.decisions:
        good = {cluster: values[-1] for cluster, values in rows.items()}
        best = max(
            (share for name, share in good.items() if name not in {FLEXIBLE, TARGET}), default=0
        )
        names = (FLEXIBLE, TARGET) if args.roles else (FLEXIBLE,)
        return any(good.get(name, best) < NEVER_WORSE * best for name in names)
    for cluster, values in rows.items():
        split, _, mode = cluster.partition(" ")
        others = [row for name, row in rows.items() if name.startswith(split)]
        if mode == PREDICTED and any(
            values[at] > SAME_SHARE * min(row[at] for row in others) for at in COMPARED
        ):
            return True
    return False


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="*", help="Mooncake traces, plain or .gz")
    parser.add_argument("--trace-block-size", type=int, default=512)
    parser.add_argument("--speeds", nargs="+", default=["1", "3", "5"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="loads and clusters whose name has this word")
    parser.add_argument("--clusters", nargs="+", default=DEFAULT_CLUSTERS, choices=CLUSTERS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="replays at a time")
    parser.add_argument("--decisions", action="store_true")
    parser.add_argument("--capacity", action="store_true")
    parser.add_argument("--roles", action="store_true")
    parser.add_argument("--workers", type=int, default=8, choices=(4, 8))
    parser.add_argument("--smear", default="3", help="seconds")
    parser.add_argument("--itl-slo", type=float, default=0.0, help="of flexible workers")
    parser.add_argument("--ttft", default="1s", help="limit of --capacity for TTFT p90")
    parser.add_argument("--timing", default="dynamo")
    parser.add_argument("--num-blocks", type=int, default=16_384)
    parser.add_argument("--keep", type=Path)
    return parser.parse_args()


def main() -> int:
    """Replay and print the table. Returns 1 if a limit is missed."""
    args = parse()
    rows: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        args.traces = [read_csv(trace, folder) for trace in args.traces]
        print("| load | cluster |", " | ".join(columns(args)), "|")
        print("|---" * (2 + len(columns(args))) + "|")
        for load, cluster, results in list(start(args, pool, folder)):
            seeds = zip(*[figures(result.result()) for result in results], strict=True)
            values = rows.setdefault(load, {})[cluster] = [median(row) for row in seeds]
            cells = " | ".join(f"{value:,.4g}" for value in values)
            print(f"| {load} | {cluster} | {cells} |", flush=True)
    return int(any(is_worse(clusters, args) for clusters in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
