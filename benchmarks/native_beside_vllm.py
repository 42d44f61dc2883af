#!/usr/bin/env python3
"""Compare the native engine with vLLM's CPU build: same float32 weights, both over HTTP, in one run.

    dynamo export FOLDER
    benchmarks/native_beside_vllm.py --model FOLDER --vllm VENV/bin/vllm [--rounds 2]

FOLDER is the default model as a Hugging Face folder in float32. VENV is the environment of vLLM, which
`scripts/engine_environment.sh VENV 0.32.0` makes.

Only one server runs at a time. Both serve FOLDER with 256 tokens in and 128 out. Without --vllm only ours is
measured. The read bandwidth of the memory is measured before every round. `ceiling` is the rate that
it allows a single stream: one pass over the weights per token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from native_engine import read_bandwidth, weight_bytes
from servers import Server, answers, free_port, start_ours

from dynamo.inference.native.engine_sizing import usable_cores
from dynamo.models.resolve import resolve_model_blocking

HERE = Path(__file__).parent
SIZES = (1, 8, 32)


def start_vllm(folder: str, vllm: str, *more: str) -> Server:
    """Start vLLM's OpenAI server on this machine's CPU."""
    port = free_port()
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [vllm, "serve", folder, "--dtype", "float32", "--enforce-eager", "--block-size", "32"]
    command += [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "smol",
        "--max-model-len",
        "8192",
        *more,
    ]
    child = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tempfile.gettempdir(),
    )
    url = f"http://127.0.0.1:{port}"
    answers(url, "smol", [child], 240)
    return Server(url, [], [child.pid], [child])


def load(server: Server, folder: str, *flags: str) -> dict[str, Any]:
    """Run the load generator once."""
    command = [
        sys.executable,
        str(HERE / "load.py"),
        "--url",
        server.url,
        "--model",
        "smol",
        "--vocabulary",
        folder,
    ]
    done = subprocess.run([*command, *flags], check=True, capture_output=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def ceiling(folder: str) -> float:
    """Return the tokens per second of a stream that the memory's read bandwidth allows now."""
    with resolve_model_blocking(folder, ensure_verified=False).open_weights() as weights:
        return round(read_bandwidth(usable_cores()) / weight_bytes(weights.config), 1)


def measure(server: Server, folder: str, seed: int) -> dict[str, float]:
    """Return tokens per second in decoding (streams / median TPOT), over the whole run, and in
    prefill."""
    figures = {"ceiling": ceiling(folder)}
    load(server, folder, "-c", "2", "--isl", "32", "--osl", "8", "--requests", "4", "--seed", "99")
    for size in SIZES:
        result = load(
            server,
            folder,
            "-c",
            str(size),
            "--isl",
            "256",
            "--osl",
            "128",
            "--requests",
            str(max(2, size)),
            "--seed",
            str(seed),
        )
        figures[f"decode_{size}"] = round(size / result["itl_ms"]["p50"] * 1e3, 1)
        figures[f"whole_{size}"] = result["tokens_per_s"]
    for isl in (256, 1024):
        result = load(
            server,
            folder,
            "-c",
            "1",
            "--isl",
            str(isl),
            "--osl",
            "1",
            "--requests",
            "4",
            "--seed",
            str(seed + 50),
        )
        figures[f"prefill_{isl}"] = round(isl / result["ttft_ms"]["p50"] * 1e3, 1)
    return figures


def main() -> None:
    """Alternate the servers, and print medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm", default="")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    starts: dict[str, Callable[[], Server]] = {
        "ours": lambda: start_ours(args.model, 1, 1, "round_robin", engine="native")
    }
    if args.vllm:
        starts["vllm"] = lambda: start_vllm(args.model, args.vllm)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
    for seed in range(1, args.rounds + 1):
        for name, start in starts.items():
            server = start()
            try:
                rows[name].append(measure(server, args.model, seed))
            finally:
                server.stop()
            print(name, json.dumps(rows[name][-1]), flush=True)
    medians = {
        n: {k: statistics.median(r[k] for r in mine) for k in mine[0]} for n, mine in rows.items()
    }
    shares = [row["decode_1"] / row["ceiling"] for row in rows["ours"]]
    summary: dict[str, Any] = {
        "medians": medians,
        "share_of_ceiling": [round(share, 2) for share in shares],
    }
    if args.vllm:
        ratios = {k: round(v / medians["vllm"][k], 2) for k, v in medians["ours"].items()}
        summary["ratios"] = ratios
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
