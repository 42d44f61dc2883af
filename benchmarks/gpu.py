#!/usr/bin/env python3
"""Check and measure the native engine on a machine with one NVIDIA card, in at most 8 minutes.

    benchmarks/gpu.py [--out gpu.json] [--parts card,live,qwen,llama] [--minutes 8]
    benchmarks/gpu.py --device cpu --quick      the same steps on the CPU, with tiny models

PyTorch and this project's packages are needed, no network. Models with random weights, in the shapes of Llama-3.1-8B and
Qwen3-0.6B, are written into a temporary folder (20 GB). Each part runs in a process of its own, as an error on a card
spoils its process. A step that fails does not end the run: it is told with the end of its traceback, a step whose code
is absent as skipped. The limits are shares of the copy and matrix speed that the same run measures. Writes JSON, and a
Markdown table beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MINUTES = 8.0
PART_S = {"card": 120, "live": 240, "qwen": 120, "llama": 240}
"""The limits of the parts in a run of so many minutes."""


def run_part(part: str, args: argparse.Namespace, limit_s: float) -> list[dict[str, Any]]:
    """Run a part in its own process and return its steps."""
    command = [sys.executable, __file__, "--part", part, "--folder", args.folder]
    command += ["--device", args.device, *(["--quick"] if args.quick else [])]
    on_cpu = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env = os.environ | (on_cpu if args.device == "cpu" else {})
    log = Path(args.folder) / f"{part}.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, start_new_session=True
        )
    try:
        end = f"exit status {child.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        end = f"its time of {limit_s:.0f} s was over"
        os.killpg(child.pid, signal.SIGTERM)
        time.sleep(5)  # for deployments
        os.killpg(child.pid, signal.SIGKILL)
    record = Path(args.folder) / f"{part}.jsonl"
    record.touch()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    steps = {line["step"]: line for line in lines}
    if child.wait():
        unfinished = [step for step in steps.values() if "seconds" not in step]
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-6:])
        for step in unfinished or [steps.setdefault(part, {"step": part, "state": "failed"})]:
            step["detail"] = f"the process ended: {end}\n{tail}"
    return list(steps.values())


def compute_part(args: argparse.Namespace) -> int:
    """Run a part in this process."""
    import gpu_live
    import gpu_parts
    from gpu_setup import Bench

    parts = {"card": gpu_parts.part_card, "live": gpu_live.part_live,
             "qwen": gpu_parts.part_qwen, "llama": gpu_parts.part_llama}  # fmt: skip
    work = parts[args.part](Bench(args))
    if work is not None:
        asyncio.run(work)
    return 0


def table(steps: list[dict[str, Any]], title: str) -> str:
    """Return the Markdown table."""
    rows = [title, "", "| Step | State | Figure | Value | Limit |", "|---|---|---|---|---|"]
    for step in steps:
        note = step.get("detail", "").strip().rpartition("\n")[2][:160].replace("|", "/")
        for figure in step.get("figures") or [{"name": note}]:
            value, limit = "", ""
            if "value" in figure:
                value = f"{figure['value']:g} {figure['unit']}"
            if "least" in figure:
                met = figure["value"] >= figure["least"]
                limit = f"at least {figure['least']:.4g}{'' if met else ' **missed**'}"
            if "most" in figure:
                met = figure["value"] <= figure["most"]
                limit = f"at most {figure['most']:.4g}{'' if met else ' **missed**'}"
            cells = (step["step"], step["state"], figure["name"], value, limit)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny models and sizes")
    parser.add_argument("--parts", default=",".join(PART_S), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of the whole run")
    parser.add_argument("--out", default="gpu.json", help="file of figures; default: %(default)s")
    parser.add_argument("--folder", default="", help="for the models; default: a temporary folder")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.part:
        return compute_part(args)
    if not find_spec("torch"):
        print("PyTorch is not installed: nothing is measured")
        return 0
    import torch

    name = f"PyTorch {torch.__version__}"
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"{name} finds no card here: nothing is measured (see --device cpu --quick)")
        return 0
    title = f"{torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}, {name}"
    title += ", quick: sizes that mean nothing" if args.quick else ""
    end, out = time.monotonic() + 60 * args.minutes - 10, Path(args.out)
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=args.folder or None) as args.folder:
        for part in args.parts.split(","):
            left_s = end - time.monotonic()
            if left_s > 20:
                limit_s = PART_S.get(part, 60) * args.minutes / MINUTES
                steps += run_part(part, args, min(limit_s, left_s))
            else:
                detail = "the time of the run is over"
                steps.append({"step": part, "state": "skipped", "detail": detail})
            out.write_text(json.dumps({"title": title, "steps": steps}, indent=1))
            out.with_suffix(".md").write_text(table(steps, title))
    print(out.with_suffix(".md").read_text())
    for step in steps:
        if step["state"] == "failed":
            print(f"FAILED {step['step']}\n{step.get('detail', '')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
