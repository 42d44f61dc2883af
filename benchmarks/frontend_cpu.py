#!/usr/bin/env python3
"""Compare the frontend CPU with that of Dynamo 1.6.1, alternating in one run.

    benchmarks/frontend_cpu.py [--model MODEL_DIR] --peer-python PEER/bin/python [--rounds 3] [--case NAME ...]
    benchmarks/frontend_cpu.py --model MODEL_DIR --stories [--rounds 3] [--case NAME ...]

Prints medians and ratios. MODEL_DIR holds the tokenizer, chat template and config of SmolLM2; weights
are not needed. Without --model, the default model's tokenizer is used, and the 8k cases are skipped,
since its context is too short. Without --peer-python only our frontend is measured. Every process of
our deployment that is not a worker counts as frontend. With --stories, four
deployments are compared, each under the load of 32 clients at the same time. The first tells no stories, and
two export spans of 1 % or of all requests. Only frontend processes count, and the record is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from servers import Server, processes, start_ours, start_peer

HERE = Path(__file__).parent
FAST, PACED = 1_000_000, 1
STORIES = ("none", "default", "sampled", "traced")
"""Kinds of stories, as in `request_calls.py`."""
CHAT = "-c 1 --isl 8192 --turns 16 --osl 1 --requests 16 --warmup 1"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS = json.dumps({"tools": [TOOL]}, separators=(",", ":"))
CASES: dict[str, tuple[float, str]] = {
    "token_saturated_c256": (FAST, "-c 256 --isl 128 --osl 64 --duration 8"),
    "token_saturated_c32": (FAST, "-c 32 --isl 128 --osl 64 --duration 6"),
    "token_with_tools_c256": (FAST, f"-c 256 --isl 128 --osl 64 --duration 8 --extra {TOOLS}"),
    "request_short_c256": (FAST, "-c 256 --isl 128 --osl 1 --duration 8"),
    "request_8k_cold": (FAST, "-c 1 --isl 8192 --osl 1 --duration 8"),
    "request_8k_next_turn": (FAST, CHAT),
    "request_8k_grown_text": (FAST, f"{CHAT} --one-message"),
    "token_paced_c32": (PACED, "-c 32 --isl 128 --osl 64 --duration 10"),
    "token_paced_c256": (PACED, "-c 256 --isl 128 --osl 64 --duration 10"),
}


def measure(server: Server, model_dir: str, flags: str, seed: int) -> dict[str, Any]:
    """Run a case on one server in a separate process and return the result."""
    ids = lambda pids: ",".join(map(str, pids))  # noqa: E731
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, str(HERE / "load.py"), "--url", server.url, "--model", "smol"]
        command += ["--vocabulary", model_dir, "--warmup", "20", *flags.split()]
        command += ["--seed", str(seed), "--out", out.name]
        command += [
            "--pid",
            f"frontend={ids(server.frontend)}",
            "--pid",
            f"workers={ids(server.workers)}",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(out.name).read_text())
        return result


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median CPU of the frontend, and of frontend and workers, in us per unit of the
    case."""
    unit = "us_per_token" if name.startswith("token") else "us_per_request"
    front = [r["processes"]["frontend"][unit] for r in rows]
    both = [f + r["processes"]["workers"][unit] for f, r in zip(front, rows, strict=True)]
    return {
        "frontend_us": statistics.median(front),
        "all_us": statistics.median(both),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in rows),
        "events_per_token": min(r["events_per_token"] for r in rows),
        "errors": sum(sum(r["errors"].values()) for r in rows),
    }


def run_case(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case `--rounds` times on both servers in turn."""
    speedup, flags = CASES[name]
    ours = start_ours(args.model, 4, speedup, args.router)
    peer = (
        start_peer(args.model, args.peer_python, 4, speedup, args.router)
        if args.peer_python
        else None
    )
    rows: dict[str, list[dict[str, Any]]] = {"ours": [], "dynamo": []}
    try:
        for seed in range(1, args.rounds + 1):
            rows["ours"].append(measure(ours, args.model, flags, seed))
            if peer:
                rows["dynamo"].append(measure(peer, args.model, flags, seed))
    finally:
        ours.stop()
        if peer:
            peer.stop()
    summaries: dict[str, Any] = {k: summary(name, v) for k, v in rows.items() if v}
    if peer:
        summaries["ratio_frontend"] = round(
            summaries["ours"]["frontend_us"] / summaries["dynamo"]["frontend_us"], 3
        )
        summaries["ratio_all"] = round(
            summaries["ours"]["all_us"] / summaries["dynamo"]["all_us"], 3
        )
    return summaries


class Collector(BaseHTTPRequestHandler):
    """Takes spans."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read a message, and take it."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def start_stories(args: argparse.Namespace, speedup: float, kind: str, collector: str) -> Server:
    """Start a deployment of which only the frontend processes count."""
    more = ("--no-record", "--no-observer") if kind == "none" else ("--no-record",)
    environ = {}
    if kind in ("sampled", "traced"):
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
    if kind == "traced":
        environ["OTEL_TRACES_SAMPLER"] = "parentbased_always_on"
    server = start_ours(args.model, 2, speedup, args.router, *more, environ=environ)
    server.frontend = processes(server.url)["frontend"]
    return server


def compare_stories(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case with each kind of stories, and return the median ratios of the CPU to none."""
    speedup, flags = CASES[name]
    flags += " -c 32 --duration 5"
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in STORIES}
    with ExitStack() as stack:
        collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        stack.callback(collector.shutdown)
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}"
        servers = {}
        for kind in STORIES:
            servers[kind] = start_stories(args, speedup, kind, url)
            stack.callback(servers[kind].stop)
        for seed in range(args.rounds):
            run = partial(measure, model_dir=args.model, flags=flags, seed=seed)
            with ThreadPoolExecutor(len(STORIES)) as pool:  # a busy machine slows all kinds alike
                for kind, row in zip(STORIES, pool.map(run, servers.values()), strict=True):
                    rows[kind].append(row)
    unit = "us_per_token" if name.startswith("token") else "us_per_request"
    times = {
        kind: [row["processes"]["frontend"][unit] for row in each] for kind, each in rows.items()
    }
    return {
        kind: {
            "us": statistics.median(each),
            "ratio": statistics.median(us / none for us, none in zip(each, times["none"], strict=True)),
            "errors": sum(sum(row["errors"].values()) for row in rows[kind]),
        }
        for kind, each in times.items()
    }  # fmt: skip


def main() -> None:
    """Run the cases, print a line for each and write all results as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder; default: the default model")
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--stories", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--router", default="round_robin")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    results = {}
    for name in args.case or [name for name in CASES if args.model or "8k" not in name]:
        results[name] = compare_stories(name, args) if args.stories else run_case(name, args)
        print(name, json.dumps(results[name]), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
