#!/usr/bin/env python3
"""Routing and eviction on public traces, by `dynamo replay`: a table of what is reached.

    benchmarks/replay_traces.py TRACES [--multiturn FILE] [--seeds N] [--jobs N] [--only WORD]
                                [--out FILE.md] [--keep FOLDER]

TRACES is a folder with Mooncake's conversation trace (mooncake_conversation_trace.jsonl), the samples
agents120_blk64, llmd_a_10qps_blk64 and llmd_a_30qps_blk64 (.jsonl.gz), and, in
dynamo_replay_reference, reports of Dynamo 1.6.1's own replay. Each figure is the median over the
seeds. A row whose files are missing is left out. Exit code 1: a figure misses its bar.
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
PEER_30QPS_MS = 13_458
"""Dynamo's own router on llmd_a_30qps, mean TTFT in its replay."""

Figures = dict[str, float]


class Case(msgspec.Struct, frozen=True):
    """One replay. `flags`: after the trace's name."""

    name: str
    trace: str
    flags: tuple[str, ...]
    eviction: str = "lru"
    chance: bool = True

    def words(self, folder: Path, seed: int) -> list[str]:
        """What comes after `dynamo replay`."""
        path = self.trace if Path(self.trace).is_absolute() else str(folder / self.trace)
        return [path, *self.flags, "--eviction", self.eviction, "--seed", str(seed)]


class Row(msgspec.Struct, frozen=True):
    """One line of the table. `bar` is reached where `measured` is at most (else at least) that."""

    what: str
    figure: str
    measured: float
    bar: float
    at_least: bool = False

    @property
    def held(self) -> bool:
        """Is the bar reached?"""
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar


def cases(multiturn: str) -> list[Case]:
    """Everything that is replayed."""
    made = [
        Case("rr", CONVERSATION, (), chance=False),
        Case("rr x3", CONVERSATION, ("--speed", "3"), chance=False),
        Case("block_cost", CONVERSATION, (*KV, "--router-policy", "block_cost")),
        Case(
            "block_cost x3",
            CONVERSATION,
            (*KV, "--router-policy", "block_cost", "--speed", "3"),
        ),
        Case("kv", CONVERSATION, (*KV,)),
        Case("kv x3", CONVERSATION, (*KV, "--speed", "3")),
        Case("kv smeared", CONVERSATION, (*KV, "--smear", "3")),
        Case("kv smeared x3", CONVERSATION, (*KV, "--smear", "3", "--speed", "3")),
        Case("kv reuse", CONVERSATION, (*KV,), eviction="reuse"),
        Case("agents rr", AGENTS, (*BLOCK_64,), chance=False),
        Case("agents kv", AGENTS, (*BLOCK_64, *KV)),
    ]
    for rate in ("10", "30"):
        trace = f"llmd_a_{rate}qps_blk64.jsonl.gz"
        made.append(Case(f"llmd {rate} rr", trace, (*BLOCK_64, *LLMD), chance=False))
        made.append(Case(f"llmd {rate} kv", trace, (*BLOCK_64, *LLMD, *KV)))
    if multiturn:
        path = str(Path(multiturn).resolve())
        made.append(Case("multiturn rr", path, (*BLOCK_64,), chance=False))
        made.append(Case("multiturn kv", path, (*BLOCK_64, *KV)))
    return made


def replay(case: Case, folder: Path, seed: int, keep: Path) -> Figures:
    """One run in a process of its own. Raises RuntimeError."""
    out = keep / f"{case.name.replace(' ', '_')}.{seed}.json"
    words = [sys.executable, "-m", "dynamo", "replay", *case.words(folder, seed)]
    done = subprocess.run([*words, "--json", str(out)], capture_output=True, text=True, check=False)
    if not out.exists():
        raise RuntimeError(done.stderr[-2000:])
    return flatten(msgspec.json.decode(out.read_bytes()))


def flatten(result: dict[str, Any]) -> Figures:
    """The figures by the names of this table."""
    figures = {"reuse": result["reuse_first_admission"], "cpu_s": result["cpu_s"]}
    figures["unanswered"] = result["requests"] - result["completed"]
    for name in ("ttft", "tpot", "itl", "e2e"):
        for point, value in result[f"{name}_ms"].items():
            figures[f"{name} {point}"] = value
    return figures


def reference(folder: Path, name: str) -> Figures:
    """A report of Dynamo's replay, in the same names."""
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
}
FAITHFUL = {
    "rr": ("conversation_8w_rr", 0.01),
    "rr x3": ("conversation_8w_rr_x3", 0.01),
    "block_cost": ("conversation_8w_kv", 0.05),
    "block_cost x3": ("conversation_8w_kv_x3", 0.05),
}
RATIOS = (
    ("agents kv", "agents rr", 1 / 6),
    ("llmd 10 kv", "llmd 10 rr", 1 / 20),
    ("multiturn kv", "multiturn rr", 0.75),
)


def rows(run: dict[str, Figures], folder: Path) -> Iterator[Row]:
    """The table."""
    yield from faithful(run, folder)
    for name, bars in BETTER.items():
        for figure, bar in bars if name in run else ():
            yield Row(name, figure, run[name][figure], bar, at_least=figure == "reuse")
    yield from ratios(run)
    for name, figures in run.items():
        if figures["unanswered"]:
            yield Row(name, "unanswered", figures["unanswered"], 0)


def faithful(run: dict[str, Figures], folder: Path) -> Iterator[Row]:
    """How far we are from Dynamo's replay of the same."""
    for name, (report, tolerance) in FAITHFUL.items():
        if name in run and (folder / REFERENCE / f"{report}.json").exists():
            for figure, theirs in reference(folder, report).items():
                off = abs(run[name][figure] / theirs - 1)
                yield Row(name, f"{figure} off Dynamo's", off, tolerance)
    if "rr" in run:
        yield Row("rr", "cpu_s", run["rr"]["cpu_s"], 60)


def ratios(run: dict[str, Figures]) -> Iterator[Row]:
    """Mean times to first token beside others'."""
    for ours, other, bar in RATIOS:
        if ours in run and other in run:
            ratio = run[ours]["ttft mean"] / run[other]["ttft mean"]
            yield Row(ours, f"ttft mean / {other}", ratio, bar)
    if "llmd 30 kv" in run:
        ratio = run["llmd 30 kv"]["ttft mean"] / PEER_30QPS_MS
        yield Row("llmd 30 kv", "ttft mean / Dynamo's", ratio, 1 / 3)


def table(found: Sequence[Row], run: dict[str, Figures]) -> str:
    """Markdown: the bars, then the figures themselves."""
    lines = ["| replay | figure | measured | bar | |", "|---|---|---|---|---|"]
    for row in found:
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
        lines.append(f"| {name} | " + " | ".join(f"{figures[one]:.4g}" for one in names) + " |")
    return "\n".join(lines) + "\n"


def medians(runs: Sequence[Figures]) -> Figures:
    """Figure by figure."""
    return {name: median(one[name] for one in runs) for name in runs[0]}


def main() -> int:
    """Replay all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("--multiturn", default="", metavar="FILE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the JSON results there")
    found = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(found.jobs) as pool:
        keep = found.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        wanted = [
            case
            for case in cases(found.multiturn)
            if found.only in case.name and (found.traces / case.trace).exists()
        ]
        pending = {
            case.name: [
                pool.submit(replay, case, found.traces, seed, keep)
                for seed in range(found.seeds if case.chance else 1)
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
    checked = list(rows(run, found.traces))
    text = table(checked, run)
    print(text)
    if found.out:
        found.out.write_text(text)
    return 0 if not failed and all(row.held for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
