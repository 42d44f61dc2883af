#!/usr/bin/env python3
"""Serve the four example graphs one after the other and measure the same load on each.

    benchmarks/deployment_modes.py [--model DIR] [--seconds 20] [--rate 6] [--isl 4000] [--osl 100]

Each graph runs four mock workers with Dynamo's timing of a step: four that do both, or two prefill and
two decode workers. Three quarters of each prompt are one of 96 common beginnings. The result is a line
of `dynamo bench` for each graph: time to first token, gaps between tokens, and end-to-end latency in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from servers import Server, answers, free_port

EXAMPLES = Path(__file__).parents[1] / "examples" / "llm"
WORKERS = 4
BOTH = (f"--AggregatedWorker.workers={WORKERS}",)
APART = (f"--PrefillWorker.workers={WORKERS // 2}", f"--DecodeWorker.workers={WORKERS // 2}")
GRAPHS = {"agg": BOTH, "agg_router": BOTH, "disagg": APART, "disagg_router": APART}


def serve(graph: str, model: str, home: str) -> Server:
    """Serve a graph with mock workers until it answers."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "dynamo", "serve", f"graphs.{graph}:Frontend"),
        *("-f", f"configs/{graph}.yaml", "--engine.kind", "mock", "--model-path", model),
        *("--http-port", str(port), "--router.port", "0", "--model.context_tokens", "16384"),
        *("--logging.level", "warn", *GRAPHS[graph]),
    ]
    environ = os.environ | {"XDG_RUNTIME_DIR": home}
    child = subprocess.Popen(command, cwd=EXAMPLES, env=environ, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    server = Server(url, [], [], [child])
    try:
        answers(url, "default", [child])
    except BaseException:
        child.send_signal(signal.SIGTERM)
        raise
    return server


def measure(url: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the result of `dynamo bench`. Each graph gets the same prompts."""
    command = [
        *(sys.executable, "-m", "dynamo", "bench", url, "--json", "--seed", "1"),
        *("--rate", str(args.rate), "--duration", f"{args.seconds}s"),
        *("--isl", str(args.isl), "--osl", str(args.osl)),
        *("--prefix-share", "0.75", "--prefixes", "96"),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    output = subprocess.run(command, check=True, **pipes).stdout  # type: ignore[call-overload]
    return dict(json.loads(output))


def main() -> None:
    """Print a row for each graph."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="folder with a tokenizer (default: SmolLM2)")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--isl", type=int, default=4000)
    parser.add_argument("--osl", type=int, default=100)
    args = parser.parse_args()
    print("graph          TTFT mean    p99   ITL mean    p99   E2E mean")
    for graph in GRAPHS:
        with tempfile.TemporaryDirectory() as home:
            server = serve(graph, args.model, home)
            try:
                result = measure(server.url, args)
            finally:
                server.stop()
        ttft, itl, e2e = (result[f"{name}_ms"] for name in ("ttft", "itl", "e2e"))
        print(
            f"{graph:13} {ttft['mean']:10.0f} {ttft['p99']:6.0f} {itl['mean']:10.1f} "
            f"{itl['p99']:6.1f} {e2e['mean']:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
