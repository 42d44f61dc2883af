#!/usr/bin/env python3
"""Replay public traces with `dynamo replay` and print a table of routing and eviction results.

    benchmarks/replay_traces.py TRACES [--multiturn FILE] [--seeds N] [--jobs N] [--only WORD]
                                [--out FILE.md] [--keep FOLDER]

TRACES is a folder with Mooncake's conversation trace (mooncake_conversation_trace.jsonl) and the
samples agents120_blk64, llmd_a_10qps_blk64 and llmd_a_30qps_blk64 (.jsonl.gz). Its folder
dynamo_replay_reference holds reports of Dynamo 1.6.1's own replay. Each value is the median over the
seeds. Rows with missing files are skipped. Exits with 1 if a value misses its target.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

CONVERSATION = "mooncake_conversation_trace.jsonl"
AGENTS = "agents120_blk64.jsonl.gz"
REFERENCE = "dynamo_replay_reference"
LLMD = ["--num-blocks", "4802"]
KV = ["--router-mode", "kv"]
BLOCK_64 = ["--trace-block-size", "64"]
SPLIT = ["--prefill-workers", "4", "--decode-workers", "4", "--disagg", "always"]
PEER_30QPS_MS = 13_458
"""Dynamo's own router on llmd_a_30qps, mean TTFT in its replay."""

Figures = dict[str, float]


class Case(msgspec.Struct, frozen=True):
    """A replay. `flags` follow the trace's name."""

    name: str
    trace: str
    flags: tuple[str, ...]
    eviction: str = "lru"
    chance: bool = True

    def words(self, folder: Path, seed: int) -> list[str]:
        """Return the arguments of `dynamo replay`."""
        path = self.trace if Path(self.trace).is_absolute() else str(folder / self.trace)
        return [path, *self.flags, "--eviction", self.eviction, "--seed", str(seed)]


class Row(msgspec.Struct, frozen=True):
    """A row of the table. `measured` must be at most `bar`, or at least `bar`."""

    what: str
    figure: str
    measured: float
    bar: float
    at_least: bool = False

    @property
    def held(self) -> bool:
        """True if the target is met."""
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


def cases(multiturn: str) -> list[Case]:
    """Return all replays."""
    cases = [
        Case("rr", CONVERSATION, (), chance=False),
        Case("rr x3", CONVERSATION, ("--speed", "3"), chance=False),
        Case("block_cost", CONVERSATION, (*KV, "--router-policy", "block_cost")),
        Case("block_cost x3", CONVERSATION, (*KV, "--router-policy", "block_cost", "--speed", "3")),
        Case("kv", CONVERSATION, (*KV,)),
        Case("kv x3", CONVERSATION, (*KV, "--speed", "3")),
        Case("kv smeared", CONVERSATION, (*KV, "--smear", "3")),
        Case("kv smeared x3", CONVERSATION, (*KV, "--smear", "3", "--speed", "3")),
        Case("split rr", CONVERSATION, (*SPLIT, "--transfer-gbps", "0"), chance=False),
        Case("split kv", CONVERSATION, (*SPLIT, *KV)),
        Case("kv reuse", CONVERSATION, (*KV,), eviction="reuse"),
        Case("agents rr", AGENTS, (*BLOCK_64,), chance=False),
        Case("agents kv", AGENTS, (*BLOCK_64, *KV)),
    ]
    for rate in ("10", "30"):
        trace = f"llmd_a_{rate}qps_blk64.jsonl.gz"
        cases.append(Case(f"llmd {rate} rr", trace, (*BLOCK_64, *LLMD), chance=False))
        cases.append(Case(f"llmd {rate} kv", trace, (*BLOCK_64, *LLMD, *KV)))
    if multiturn:
        path = str(Path(multiturn).resolve())
        cases.append(Case("multiturn rr", path, (*BLOCK_64,), chance=False))
        cases.append(Case("multiturn kv", path, (*BLOCK_64, *KV)))
    return cases


def replay(case: Case, folder: Path, seed: int, keep: Path) -> Figures:
    """Run a replay in a separate process. Raises `RuntimeError`."""
    out = keep / f"{case.name.replace(' ', '_')}.{seed}.json"
    words = [sys.executable, "-m", "dynamo", "replay", *case.words(folder, seed)]
    done = subprocess.run([*words, "--json", str(out)], capture_output=True, text=True, check=False)
    if not out.exists():
        raise RuntimeError(done.stderr[-2000:])
    return flatten(msgspec.json.decode(out.read_bytes()))


def flatten(result: dict[str, Any]) -> Figures:
    """Return the metrics of a result by the names of the table."""
    figures = {"reuse": result["reuse_first_admission"], "cpu_s": result["cpu_s"]}
    figures["unanswered"] = result["requests"] - result["completed"]
    for name in ("ttft", "tpot", "itl", "e2e"):
        for point, value in result[f"{name}_ms"].items():
            figures[f"{name} {point}"] = value
    return figures


def reference(folder: Path, name: str) -> Figures:
    """Return the metrics of a report of Dynamo's replay by the same names."""
    whole = msgspec.json.decode((folder / REFERENCE / f"{name}.json").read_bytes())
    report = whole["report"]["summary"]
    return {
        "reuse": report["first_admission_prefix_cache_reused_ratio"],
        "ttft mean": report["mean_ttft_ms"],
        "ttft p50": report["median_ttft_ms"],
        "ttft p99": report["p99_ttft_ms"],
        "tpot mean": report["mean_tpot_ms"],
        "tpot p99": report["p99_tpot_ms"],
        "e2e mean": report["mean_e2e_latency_ms"],
    }


BETTER = {
    "kv": (
        ("reuse", 0.255),
        ("ttft mean", 225),
        ("ttft p99", 1680),
        ("tpot p99", 14),
        ("e2e mean", 2720),
    ),
    "kv x3": (
        ("reuse", 0.255),
        ("ttft mean", 247),
        ("ttft p99", 1750),
        ("tpot p99", 23),
        ("e2e mean", 4420),
    ),
    "kv smeared": (("ttft mean", 205),),
    "kv smeared x3": (("ttft mean", 226), ("tpot p99", 25)),
    "kv reuse": (("reuse", 0.275),),
    "split kv": (("ttft mean", 360), ("e2e mean", 2980)),
}
FAITHFUL = {
    "rr": ("conversation_8w_rr", 0.01),
    "rr x3": ("conversation_8w_rr_x3", 0.01),
    "block_cost": ("conversation_8w_kv", 0.05),
    "block_cost x3": ("conversation_8w_kv_x3", 0.05),
}
PEER_SPLIT = {"ttft mean": 499, "ttft p50": 349, "ttft p99": 2461}
"""Dynamo 1.6.1's replay of 4 prefill and 4 decode workers, round robin, in milliseconds."""
PEER_SPLIT_E2E_MS = 3156
FIRST_STEP_MS = 11
"""Dynamo's first token comes out of the first decode step, ours out of the prefill worker."""
RATIOS = (
    ("agents kv", "agents rr", 1 / 6),
    ("llmd 10 kv", "llmd 10 rr", 1 / 20),
    ("multiturn kv", "multiturn rr", 0.75),
)


def rows(run: dict[str, Figures], folder: Path) -> Iterator[Row]:
    """Yield the rows of the table."""
    yield from faithful(run, folder)
    for name, bars in BETTER.items():
        for figure, bar in bars if name in run else ():
            yield Row(name, figure, run[name][figure], bar, at_least=figure == "reuse")
    yield from ratios(run)
    for name, figures in run.items():
        if figures["unanswered"]:
            yield Row(name, "unanswered", figures["unanswered"], 0)


def faithful(run: dict[str, Figures], folder: Path) -> Iterator[Row]:
    """Yield the differences to Dynamo's replay of the same trace."""
    for name, (report, tolerance) in FAITHFUL.items():
        if name in run and (folder / REFERENCE / f"{report}.json").exists():
            for figure, theirs in reference(folder, report).items():
                off = abs(run[name][figure] / theirs - 1)
                yield Row(name, f"{figure} off Dynamo's", off, tolerance)
    if "split rr" in run:
        figures = run["split rr"]
        for figure, theirs in PEER_SPLIT.items():
            off = abs(figures[figure] / (theirs - FIRST_STEP_MS) - 1)
            yield Row("split rr", f"{figure} off Dynamo's", off, 0.01)
        off = abs(figures["e2e mean"] / PEER_SPLIT_E2E_MS - 1)
        yield Row("split rr", "e2e mean off Dynamo's", off, 0.02)
    if "rr" in run:
        yield Row("rr", "cpu_s", run["rr"]["cpu_s"], 60)


def ratios(run: dict[str, Figures]) -> Iterator[Row]:
    """Yield ratios of mean TTFTs."""
    for ours, other, bar in RATIOS:
        if ours in run and other in run:
            ratio = run[ours]["ttft mean"] / run[other]["ttft mean"]
            yield Row(ours, f"ttft mean / {other}", ratio, bar)
    if "llmd 30 kv" in run:
        ratio = run["llmd 30 kv"]["ttft mean"] / PEER_30QPS_MS
        yield Row("llmd 30 kv", "ttft mean / Dynamo's", ratio, 1 / 3)


def table(rows: Sequence[Row], run: dict[str, Figures]) -> str:
    """Return the targets and then all metrics as Markdown."""
    lines = ["| replay | figure | measured | bar | |", "|---|---|---|---|---|"]
    for row in rows:
        sign = ">=" if row.at_least else "<="
        verdict = "held" if row.held else "MISSED"
        lines.append(
            f"| {row.what} | {row.figure} | {row.measured:.4g} | {sign} {row.bar:.4g} | {verdict} |"
        )
    names = (
        "reuse",
        "ttft mean",
        "ttft p50",
        "ttft p99",
        "tpot mean",
        "tpot p99",
        "e2e mean",
        "cpu_s",
    )
    lines += ["", f"| replay | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for name, figures in run.items():
        lines.append(f"| {name} | " + " | ".join(f"{figures[key]:.4g}" for key in names) + " |")
    return "\n".join(lines) + "\n"


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each metric."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


def main() -> int:
    """Run all replays and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("--multiturn", default="", metavar="FILE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the JSON results there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        keep = args.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        wanted = [
            case
            for case in cases(args.multiturn)
            if args.only in case.name and (args.traces / case.trace).exists()
        ]
        pending = {
            case.name: [
                pool.submit(replay, case, args.traces, seed, keep)
                for seed in range(args.seeds if case.chance else 1)
            ]
            for case in wanted
        }
        run: dict[str, Figures] = {}
        failed = []
        for name, futures in pending.items():
            try:
                run[name] = medians([future.result() for future in futures])
                print(f"{name}: done", file=sys.stderr)
            except RuntimeError as error:
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr)
    checked = list(rows(run, args.traces))
    text = table(checked, run)
    print(text)
    if args.out:
        args.out.write_text(text)
    return 0 if not failed and all(row.held for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
