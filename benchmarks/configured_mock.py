#!/usr/bin/env python3
"""Serve what `dynamo configure` writes with mock engines, and compare with what it predicts.

    benchmarks/configured_mock.py --model MODEL [--only CASE] [--port 8000]

MODEL is a folder with a tokenizer. Mock workers serve the `serve.yaml` of each case with its
`timing.json`, slowed down so that the machine keeps up. Routers that choose by predicted times are
slowed little, since their own constants are not slowed. `dynamo bench` sends the arrivals of the
finalist's replay. Mean times are compared with those that `why.md` tells.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from servers import answers
from targets import Targets

from dynamo.operations.arrivals import SyntheticLoad
from dynamo.operations.configure.finalists import (
    BLOCK_TOKENS,
    FEWEST_REQUESTS,
    MOST_REQUESTS,
    TURNS,
)
from dynamo.operations.replay.trace import ArrivalOptions, make_synthetic_trace

DYNAMO = (sys.executable, "-m", "dynamo")
WITHIN = 10.0


class Case(msgspec.Struct, frozen=True):
    """A question, which of its finalists is served, and how slowly."""

    kind: str
    model: str
    flags: str
    isl: int
    osl: int
    slow: float


CASES = {
    "dense": Case("aggregated", "Qwen/Qwen3-8B", "--gpu l40s --rate .6 --good tpot=40ms", 800, 100, 3),
    "experts": Case("aggregated", "openai/gpt-oss-120b",
                    "--gpu b200_sxm --gpus 2 --engine trtllm --good tpot=7ms", 2000, 80, 16),
    "experts apart": Case("disaggregated", "Qwen/Qwen3-30B-A3B",
                          "--gpu h200_sxm --gpus 2 --engine vllm --good tpot=8ms", 2000, 80, 10),
    "dense apart": Case("disaggregated", "Qwen/Qwen3-32B",
                        "--gpu h200_sxm --gpus 4 --engine vllm --good ttft=1s,tpot=20ms", 1000, 60, 8),
    "flexible": Case("flexible", "meta-llama/Llama-3.1-8B",
                     "--gpu l40s --gpus 2 --engine sglang --good tpot=40ms", 800, 100, 2),
}  # fmt: skip


def configure(case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the configuration. Returns the plan, and the replay of the finalist."""
    command = [*DYNAMO, "configure", case.model, *case.flags.split(), "--isl", str(case.isl)]
    command += ["--osl", str(case.osl), "--out", str(folder), "--force", "--json", "-"]
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    replayed = next(each for each in answer["replayed"] if each["kind"] == case.kind)
    return answer["plans"][0], replayed


def write_trace(case: Case, plan: dict[str, Any], rate: float, path: Path) -> int:
    """Write the arrivals of the finalist's replay. Returns their number."""
    count = TURNS * plan["concurrency"] * plan["replicas"]
    load = SyntheticLoad(
        case.isl, case.osl, min(max(FEWEST_REQUESTS, count), MOST_REQUESTS), rate / case.slow
    )
    lines = [
        json.dumps({
            "timestamp": 1e3 * conversation.start_s,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [],
        })
        for conversation in make_synthetic_trace(load, ArrivalOptions(seed=1))
        for request in conversation.requests
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def serving(
    case: Case, plan: dict[str, Any], folder: Path, model: str, port: int
) -> Sequence[Sequence[str]]:
    """Return the commands that serve the folder with mock engines: prefill workers have step times
    of their own."""
    tokens = min(plan["capacity"], 1.25 * plan["concurrency"]) + 1
    common = [
        "out=mock", model, "-f", str(folder / "serve.yaml"), "--deployment", f"configured-{port}",
        "--block-size", str(BLOCK_TOKENS), "--speedup-ratio", str(1 / case.slow),
        "--num-blocks", str(int(tokens * 2 * (case.isl + case.osl) / BLOCK_TOKENS)),
        "--tensor-parallel-size", "1", "--kv-cache-dtype", "auto",
    ]  # fmt: skip
    main = [*DYNAMO, "run", *common, "--http-port", str(port)]
    main += ["--timing", str(folder / "timing.json")]
    if case.kind == "flexible":
        main += ["--router-mode", "kv", "--disagg", "flexible"]
    if case.kind != "disaggregated":
        return [main]
    main += ["--prefill-workers", "0", "--decode-workers", str(plan["replicas"])]
    ahead = [*DYNAMO, "run", "in=none", *common, "--decode-workers", "0"]
    ahead += ["--prefill-workers", str(plan["prefill_workers"])]
    ahead += ["--timing", str(folder / "prefill-timing.json")]
    return [main, ahead]


def _wait_for_port(port: int) -> None:
    for _ in range(300):
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.2)


def measure(case: Case, folder: Path, model: str, port: int) -> dict[str, Any]:
    """Return predicted and measured values of a case."""
    plan, replayed = configure(case, folder)
    count = write_trace(case, plan, replayed["rate"], folder / "arrivals.jsonl")
    url = f"http://127.0.0.1:{port}"
    children: list[subprocess.Popen[bytes]] = []
    try:
        for command in serving(case, plan, folder, model, port):
            with (folder / f"serve-{len(children)}.log").open("wb") as log:
                children.append(subprocess.Popen(command, stdout=log, stderr=log))
            _wait_for_port(port)
        answers(url, "default", children)
        result = folder / "bench.json"
        command = [
            *DYNAMO,
            "bench",
            url,
            "--completions",
            "--trace",
            str(folder / "arrivals.jsonl"),
        ]
        subprocess.run([*command, "--out", str(result)], check=True, stdout=subprocess.DEVNULL)
    finally:
        for child in reversed(children):
            child.terminate()
        for child in children:
            child.wait()
    measured = json.loads(result.read_bytes())
    return {
        "requests": count,
        "answered": measured["requests"],
        "ttft_ms": [replayed["ttft_ms"], measured["ttft_ms"]["mean"] / case.slow],
        "tpot_ms": [replayed["tpot_ms"], measured["tpot_ms"]["mean"] / case.slow],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    targets, results = Targets(), {}
    for number, name in enumerate(args.only or CASES):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measured = measure(
                CASES[name], Path(folder), args.model, args.port + number
            )
        targets.at_least(f"{name}: answered", measured["answered"], measured["requests"])
        for what in ("ttft_ms", "tpot_ms"):
            predicted, seen = measured[what]
            off = round(100 * abs(seen / predicted - 1), 1)
            targets.at_most(f"{name}: {what} off", off, WITHIN, " %")
        print(name, measured, file=sys.stderr)
    targets.print_report(results, "predicted and served")
    sys.exit(targets.exit_code)


if __name__ == "__main__":
    main()
