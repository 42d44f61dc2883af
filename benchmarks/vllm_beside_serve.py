#!/usr/bin/env python3
"""Compare `dynamo run out=vllm` with `vllm serve` on CPUs: the same engine settings, alternating, in one run.

    make test-engines ARGS=--collect-only
    .venv-engines/bin/python benchmarks/vllm_beside_serve.py [--rounds 2]

Counted is the CPU of all processes that are neither an engine core of vLLM nor its workers: the supervisor,
frontend and worker of ours, the API server of theirs. `cpu_us_per_token`: at 16 streams of 200 tokens.
`ttft_ms`: the median time to the first token at one stream. All requests sample without limits: defaults
differ between the servers, and on a CPU `top_p` makes a step of a small model half as long again. `--model`
may be a folder with few layers, so that the engine does not hide the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from native_beside_vllm import load, start_vllm
from servers import Server, start_ours

ENGINES = Path(__file__).parent.parent / ".venv-engines"
STREAMS, TOKENS = 16, 200
SAMPLING = '{"temperature": 1.0, "top_p": 1.0, "top_k": 0}'
START_TIMEOUT_S = 300.0
OURS = ("dtype=float32", "enforce_eager=true", "block_size=32")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def measure(server: Server, folder: str, seed: int) -> dict[str, float]:
    """Return CPU and time to the first token."""
    pids = ",".join(
        map(str, {*server.frontend, *server.workers, *(c.pid for c in server.children)})
    )
    warm = ("-c", "2", "--isl", "32", "--osl", "8", "--requests", "4", "--seed", "99")
    load(server, folder, *warm)
    sizes = ("--isl", "32", "--extra", SAMPLING, "--seed", str(seed))
    work = ("--osl", str(TOKENS), "--requests", str(2 * STREAMS), "--pid", f"all={pids}")
    many = load(server, folder, "-c", str(STREAMS), *sizes, *work)
    single = load(server, folder, "-c", "1", *sizes, "--osl", "8", "--requests", "40")
    return {
        "cpu_us_per_token": many["processes"]["all"]["us_per_token"],
        "ttft_ms": single["ttft_ms"]["p50"],
        "tokens_per_s": many["tokens_per_s"],
    }


def main() -> None:
    """Alternate the servers, and print medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ENGINES / "model"))
    parser.add_argument("--vllm", default=str(Path(sys.executable).parent / "vllm"))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    flags = [word for argument in OURS for word in ("--engine-arg", argument)]
    flags += ["--max-num-seqs", str(STREAMS), "--max-model-len", "8192"]
    starts: dict[str, Callable[[], Server]] = {
        "ours": lambda: start_ours(
            args.model, 1, 1, "round_robin", *flags, engine="vllm", timeout_s=START_TIMEOUT_S
        ),
        "theirs": lambda: start_vllm(args.model, args.vllm, "--max-num-seqs", str(STREAMS)),
    }
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
        name: {key: statistics.median(row[key] for row in mine) for key in mine[0]}
        for name, mine in rows.items()
    }
    ratios = {k: round(v / medians["theirs"][k], 2) for k, v in medians["ours"].items()}
    print(json.dumps({"medians": medians, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
