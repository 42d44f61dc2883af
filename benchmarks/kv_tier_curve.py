#!/usr/bin/env python3
"""Replay traces over sizes of host memory for KV blocks, and draw the curve of reuse and latency.

    benchmarks/kv_tier_curve.py TRACES [--speed 3] [--device 4096 16384] [--gbps 25] [--check]
                                [--host 0 4096 16384 65536 262144] [--picture FILE.png] [--out FILE.json]

TRACES is a folder with Mooncake's conversation trace. The second workload is synthetic: 4,000 prompts of
144 blocks, of which two thirds are one of 800 common beginnings, at 12 requests/s. Each runs with
`--router-mode kv` on 8 engines. The published points are of another trace of
Mooncake's on one global cache (arXiv 2407.00079, table 1, LRU, blocks of 512 tokens). Its reuse is 30 % with
1,000 blocks and 50 % with 50,000. The plot shows them as shares of the whole reuse of the conversation
trace. `--check` runs the bars only and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from targets import Targets

from dynamo.core.timing.model import DYNAMO_TIMING

CONVERSATION = "mooncake_conversation_trace.jsonl"
ENGINES = 8
BLOCK_TOKENS = 64
PROMPTS, COMMON, COMMON_BLOCKS, OWN_BLOCKS, PER_S = 4_000, 800, 96, 48, 12.0
INFINITE_REUSE = {"conversation": 0.374}
"""Reuse with one infinite cache."""
PUBLISHED = ((1_000 * 8, 0.30 / 0.51), (50_000 * 8, 0.50 / 0.51))
"""(blocks of 64 tokens in all, share of the reuse of an infinite cache)."""

TIMED_BLOCKS = 16_384
"""Blocks of the engine that Dynamo's timing describes. Its decode steps depend on the share of the
blocks in use. Engines with fewer blocks would be slower, so their coefficients are scaled."""

Figures = dict[str, float]


class Run(msgspec.Struct, frozen=True):
    """A replay: blocks of each engine on the device and in host memory, and the host's speed."""

    workload: str
    device: int
    host: int
    gbps: float

    def flags(self) -> list[str]:
        """Return the flags of `dynamo replay`."""
        tier = ["--host-blocks", str(self.host), "--host-gbps", str(self.gbps)]
        return ["--num-blocks", str(self.device), *(tier if self.host else ())]

    def write_timing(self, path: Path) -> str:
        """Write the timing of the same engine with this number of blocks. Return its path."""
        decode = [
            coefficient * (self.device / TIMED_BLOCKS) ** degree
            for degree, coefficient in enumerate(DYNAMO_TIMING.decode)
        ]
        path.write_bytes(msgspec.json.encode(replace(DYNAMO_TIMING, decode=tuple(decode))))
        return str(path)


def main() -> int:
    """Run the replays and print, write and draw the results."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        traces = {
            "conversation": [str(Path(args.traces) / CONVERSATION), "--speed", str(args.speed)],
            "synthetic": [
                write_synthetic(Path(folder) / "synthetic.jsonl"),
                "--trace-block-size",
                "64",
            ],
        }
        if args.check:
            return check_bars(traces["conversation"], Path(folder))
        results = []
        for device in args.device:
            for host in args.host:
                for workload in traces:
                    run = Run(workload, device, host, args.gbps)
                    figures = replay(run, traces[workload], Path(folder))
                    print(format_row(run, figures), flush=True)
                    results.append({**msgspec.to_builtins(run), **figures})
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1))
    if args.picture:
        draw(results, args.picture)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("traces")
    parser.add_argument("--speed", type=float, default=3.0)
    parser.add_argument("--device", type=int, nargs="+", default=[4_096, 16_384])
    parser.add_argument("--host", type=int, nargs="+", default=[0, 4_096, 16_384, 65_536, 262_144])
    parser.add_argument("--gbps", type=float, default=25.0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--picture")
    parser.add_argument("--out")
    return parser.parse_args()


def write_synthetic(path: Path) -> str:
    """Write a trace of prompts that share two thirds with others. Return its path."""
    rng = random.Random(1)
    at_s, next_block = 0.0, COMMON * COMMON_BLOCKS
    with path.open("w") as file:
        for _ in range(PROMPTS):
            at_s += rng.expovariate(PER_S)
            first = rng.randrange(COMMON) * COMMON_BLOCKS
            blocks = [
                *range(first, first + COMMON_BLOCKS),
                *range(next_block, next_block + OWN_BLOCKS),
            ]
            next_block += OWN_BLOCKS
            row = {
                "timestamp": round(at_s * 1e3),
                "input_length": len(blocks) * BLOCK_TOKENS,
                "output_length": rng.randrange(50, 350),
                "hash_ids": blocks,
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


def replay(run: Run, trace: Sequence[str], folder: Path) -> Figures:
    """Replay in a separate process. Raises `RuntimeError`."""
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    words = [sys.executable, "-m", "dynamo", "replay", *trace, *run.flags()]
    words += ["--timing", run.write_timing(folder / "timing.json")]
    words += ["--router-mode", "kv", "--eviction", "lru", "--block-size", str(BLOCK_TOKENS)]
    done = subprocess.run([*words, "--json", str(out)], capture_output=True, text=True, check=False)
    if not out.exists():
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(out.read_text())
    return {
        "reuse": result["reuse_first_admission"],
        "ttft_ms": result["ttft_ms"]["mean"],
        "ttft_p99_ms": result["ttft_ms"]["p99"],
        "e2e_ms": result["e2e_ms"]["mean"],
        "unanswered": result["requests"] - result["completed"],
    }


def format_row(run: Run, figures: Figures) -> str:
    """Return a line of the table."""
    return (
        f"{run.workload:13s} device {run.device:6d}  host {run.host:7d} at {run.gbps:g} GB/s  "
        f"reuse {figures['reuse']:.3f}  TTFT {figures['ttft_ms']:6.1f} p99 {figures['ttft_p99_ms']:7.1f}  "
        f"E2E {figures['e2e_ms']:7.1f} ms"
    )


def check_bars(trace: Sequence[str], folder: Path) -> int:
    """Compare the conversation trace with its bars. Return the exit code."""
    targets = Targets()
    runs = {
        "none": Run("conversation", 4_096, 0, 0),
        "65,536": Run("conversation", 4_096, 65_536, 25),
        "16,384": Run("conversation", 16_384, 16_384, 25),
        "slow": Run("conversation", 4_096, 65_536, 3),
    }
    results = {}
    for name, run in runs.items():
        results[name] = replay(run, trace, folder)
        print(format_row(run, results[name]), flush=True)
    large, same, none, slow = (results[name] for name in ("65,536", "16,384", "none", "slow"))
    targets.at_least("reuse, 4,096 + 65,536", large["reuse"], 0.32)
    targets.at_most("TTFT, 4,096 + 65,536", large["ttft_ms"], 258)
    targets.at_most("E2E, 4,096 + 65,536", large["e2e_ms"], 4_200)
    targets.at_least("reuse, 16,384 + 16,384", same["reuse"], 0.305)
    targets.at_most("TTFT, 16,384 + 16,384", same["ttft_ms"], 251)
    targets.at_most("TTFT at 3 GB/s, of none", slow["ttft_ms"] / none["ttft_ms"], 1.01)
    targets.at_most("E2E at 3 GB/s, of none", slow["e2e_ms"] / none["e2e_ms"], 1.01)
    targets.print_report(results, "conversation trace, mode kv")
    return targets.exit_code


def draw(results: Sequence[dict[str, Any]], path: str) -> None:
    """Draw reuse and TTFT over all blocks of an engine, for each workload and device size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.0), dpi=110, layout="constrained")
    reuse, ttft = figure.subplots(1, 2)
    lines = sorted({(row["workload"], row["device"]) for row in results})
    for workload, device in lines:
        rows = [row for row in results if (row["workload"], row["device"]) == (workload, device)]
        blocks = [ENGINES * (row["device"] + row["host"]) for row in rows]
        label = f"{workload}, {device:,} on each device"
        reuse.plot(blocks, [row["reuse"] for row in rows], marker="o", label=label)
        ttft.plot(blocks, [row["ttft_ms"] for row in rows], marker="o", label=label)
    whole = INFINITE_REUSE["conversation"]
    reuse.axhline(
        whole, color="black", linestyle="--", linewidth=1, label="conversation, one infinite cache"
    )
    reuse.plot(
        [blocks for blocks, _ in PUBLISHED],
        [share * whole for _, share in PUBLISHED],
        "kx",
        label="published shape (another trace, one cache), scaled",
    )
    reuse.set_ylabel("share of prompt tokens reused")
    ttft.set_ylabel("mean time to first token, ms")
    for panel in (reuse, ttft):
        panel.set_xscale("log")
        panel.set_xlabel(f"blocks of {BLOCK_TOKENS} tokens, device and host, all {ENGINES} engines")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
