#!/usr/bin/env python3
"""Measure what sharing the weights among native workers saves: CPU, memory, time to serve again.

    benchmarks/shared_weights.py [--case start|decode|kills|peers|snapshot] [--model DIR] [--rounds 3] [--kills 50]

- start: starts of one, two and four workers, with private and shared weights in turns: CPU of the
  workers until they serve, seconds, and the PSS of the workers.
- decode: tokens per second of an engine with private and one with shared weights, in turns.
- kills: two workers under streams, of which one is killed again and again (SIGKILL). Measures the
  time until its place serves again, compares texts, and counts what is left over. The supervisor's
  pauses grow with deaths less than 10 s apart: `--every 15` measures without them.
- peers: starts of one worker beside a deployment that has the weights, in turns in its namespace
  and in another one. In the first, they are read from the peer, in the second from the file.
- snapshot: starts of four workers of a snapshot (CRIU) and of the file, in turns: seconds, and the
  CPU of all processes until they serve and stop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from load import vocabulary
from native_engine import decode
from processes import deployment_of, ready, wait_ready
from servers import Server, free_port
from startup import cpu_s
from streams import StreamClient, now, quantile
from targets import Targets

from dynamo.core.clock import SystemClock
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.native.shared_weights import SharedWeights
from dynamo.models.resolve import resolve_model_blocking
from dynamo.runtime.shared_memory import SharedMemoryBroker, SharedMemoryClient

PRIVATE = "import dynamo.runtime.shared_memory as memory; memory.SUPPORTED = False"
MAIN = "import sys; from dynamo.__main__ import main; sys.exit(main(sys.argv[1:]))"
BLOCKS = ("--num-blocks", "256")
STREAMS, TOKENS, PROMPT = 4, 24, 16


@contextlib.contextmanager
def deployment(
    model: str, workers: int, *more: str, shared: bool = True, words: Sequence[str] = ()
) -> Iterator[Server]:
    """Yield a deployment of native workers that serves. `words` replace those of `dynamo run`."""
    url = f"http://127.0.0.1:{free_port()}"
    code = MAIN if shared else f"{PRIVATE}; {MAIN}"
    words = words or ("run", *filter(None, [model]), "out=native", "--model-name", "smol")
    command = [sys.executable, "-c", code, *words]
    command += ["--workers", str(workers), "--http-port", url.rsplit(":", 1)[1], *BLOCKS, *more]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        server = Server(url, [], [], [child])
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health"):
                    break
                if child.poll() is not None:
                    sys.exit("the deployment ended at once")
                time.sleep(0.02)
            yield server
        finally:
            server.stop()


def pss_mb(pids: Sequence[int]) -> float:
    """Return the proportional memory of processes in MB."""
    lines = [
        line
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    ]
    return sum(int(line.split()[1]) for line in lines) / 1024


def ask(server: Server) -> str:
    """Return an answer of 16 tokens."""
    messages = [{"role": "user", "content": "What is a list?"}]
    body = {"model": "smol", "messages": messages, "max_tokens": 16, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def measure_start(model: str, workers: int, shared: bool, *more: str) -> dict[str, Any]:
    """Start workers; return figures of their start, and an answer of each."""
    began = now()
    with deployment(model, workers, *more, shared=shared) as server:
        wait_ready(deployment_of(server), "worker", workers)
        seconds = now() - began
        pids = [record.pid for record in ready(deployment_of(server), "worker")]
        cpu = sorted(cpu_s(pid) for pid in pids)
        answers = {ask(server) for _ in range(2 * workers)}
        return {"s": seconds, "cpu": cpu, "pss": pss_mb(pids), "answers": answers}


def case_start(args: argparse.Namespace) -> Targets:
    """Compare starts with private and with shared weights."""
    runs: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for workers in (1, 2, 4):
            for shared in (False, True):
                figures = measure_start(args.model, workers, shared)
                runs.setdefault((workers, shared), []).append(figures)

    def median(workers: int, shared: bool, key: str) -> float:
        values = [run[key] for run in runs[workers, shared]]
        return statistics.median(sum(v) if isinstance(v, list) else v for v in values)

    further = statistics.median(run["cpu"][0] for run in runs[2, True])
    private = median(1, False, "cpu")
    answers = set().union(*(run["answers"] for each in runs.values() for run in each))
    targets = Targets()
    targets.at_most("CPU of the second worker, share of private", further / private, 0.35)
    targets.at_most("CPU of the second worker", further, 0.8, " s")
    share = median(4, True, "cpu") / median(4, False, "cpu")
    targets.at_most("CPU of a start of four, share of private", share, 0.45)
    targets.at_most("PSS of four workers", median(4, True, "pss"), 750, " MB")
    later = median(4, True, "s") - median(1, True, "s")
    targets.at_most("start of four after a start of one", later, 2, " s")
    targets.at_most("different texts", len(answers), 1)
    result = {
        f"{workers} workers, {'shared' if shared else 'private'}": {
            key: round(median(workers, shared, key), 2) for key in ("cpu", "s", "pss")
        }
        for workers, shared in runs
    }
    targets.print_report(result, "starts")
    return targets


def case_peers(args: argparse.Namespace) -> Targets:
    """Compare starts from a peer's memory and from the file."""
    targets = Targets()
    runs: dict[str, list[dict[str, Any]]] = {"peer": [], "file": []}
    with tempfile.TemporaryDirectory() as folder:
        shared = ("--discovery", f"file:{folder}", "--transfer-plane", "tcp:")
        with deployment(args.model, 1, *shared):
            while not any(b"/weights/" in file.read_bytes() for file in Path(folder).glob("*/?*")):
                time.sleep(0.1)
            for _ in range(args.rounds):
                for name, namespace in (("peer", "dynamo"), ("file", "other")):
                    more = (*shared, "--namespace", namespace)
                    runs[name].append(measure_start(args.model, 1, True, *more))
    result = {
        name: {
            "cpu": round(statistics.median(run["cpu"][0] for run in each), 2),
            "s": round(statistics.median(run["s"] for run in each), 2),
        }
        for name, each in runs.items()
    }
    share = result["peer"]["cpu"] / result["file"]["cpu"]
    targets.at_most("CPU of a start from a peer, share of the file's", round(share, 2), 1)
    answers = {text for each in runs.values() for run in each for text in run["answers"]}
    targets.at_most("different texts", len(answers), 1)
    targets.print_report(result, "starts")
    return targets


def case_snapshot(args: argparse.Namespace) -> Targets:
    """Compare starts of a snapshot and of the file."""
    targets = Targets()
    runs: dict[str, list[dict[str, float]]] = {"snapshot": [], "file": []}
    with tempfile.TemporaryDirectory() as state:
        folder = str(Path(state, "snapshot"))
        words = [
            "save",
            folder,
            *filter(None, [args.model]),
            "out=native",
            "--model-name",
            "smol",
            *BLOCKS,
        ]
        subprocess.run([sys.executable, "-m", "dynamo", "snapshot", *words], check=True)
        for _ in range(args.rounds):
            for name, load in (("snapshot", ("snapshot", "load", folder)), ("file", ())):
                began, cpu_before = now(), sum(os.times()[2:4])
                with deployment(args.model, 4, words=load) as server:
                    wait_ready(deployment_of(server), "worker", 4)
                    seconds = now() - began
                runs[name].append({"s": seconds, "cpu": sum(os.times()[2:4]) - cpu_before})
    result = {
        name: {key: round(statistics.median(run[key] for run in each), 2) for key in ("cpu", "s")}
        for name, each in runs.items()
    }
    share = result["snapshot"]["cpu"] / result["file"]["cpu"]
    targets.at_most("CPU of a start of a snapshot, share of the file's", round(share, 2), 1)
    targets.print_report(result, "starts")
    return targets


def case_decode(args: argparse.Namespace) -> Targets:
    """Compare the speed of two engines."""
    targets = Targets()
    result = asyncio.run(_decode_in_turns(args))
    for batch, rates in result.items():
        pairs = zip(rates["shared"], rates["private"], strict=True)
        share = statistics.median(shared / private for shared, private in pairs)
        targets.at_least(f"tokens/s at {batch}, share of private", round(share, 3), 0.95)
    targets.print_report(result, "decode")
    return targets


async def _decode_in_turns(args: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    files = resolve_model_blocking(args.model, ensure_verified=False)
    settings = EngineSettings(prefix_caching=False, num_blocks=1024)
    broker = SharedMemoryBroker(SystemClock(), lambda: None)
    with broker.channel() as child_end:
        assert child_end is not None
        shared = SharedWeights(SharedMemoryClient(child_end.detach()), files.path)
        engines = {
            "private": BatchedEngine(NativeRunner(files.open_weights, settings)),
            "shared": BatchedEngine(
                NativeRunner(files.open_weights, settings, shared_weights=shared)
            ),
        }
        for engine in engines.values():
            await engine.start()
            for _ in range(2):
                await decode(engine, 2, 64, 8)
        while any(thread.name == "huge-pages" for thread in threading.enumerate()):
            await asyncio.sleep(0.1)
        rates: dict[int, dict[str, list[float]]] = {}
        for number in range(args.rounds):
            for batch in (1, 8, 32):
                order = sorted(engines, reverse=bool(number % 2))
                for name in order:
                    rate = await decode(engines[name], batch, 64, 48)
                    by_name = rates.setdefault(batch, {})
                    by_name.setdefault(name, []).append(round(rate, 1))
        for engine in engines.values():
            await engine.stop()
    broker.close()
    return rates


def case_kills(args: argparse.Namespace) -> Targets:
    """Kill a worker again and again under streams."""
    with deployment(args.model, 2, *args.more) as server:
        supervisor = server.children[0].pid
        wait_ready(deployment_of(server), "worker", 2)
        result = uvloop.run(_kill_under_streams(args, server, supervisor))
    targets = Targets()
    targets.at_most("failed streams", result["failed"], 0)
    targets.at_most("altered texts", result["altered"], 0)
    limit = 0.1 if any("standby" in word for word in args.more) else 1.0
    targets.at_most("seconds until the place serves, p50", result["again_s"]["p50"], limit, " s")
    targets.at_most("descriptors left over", result["descriptors"], 0)
    targets.at_most("processes left over", result["processes"], 0)
    targets.at_most("memory left over", result["mb"], 64, " MB")
    targets.print_report(result, f"{args.kills} kills")
    return targets


async def _kill_under_streams(
    args: argparse.Namespace, server: Server, supervisor: int
) -> dict[str, Any]:
    client = StreamClient(server.url, vocabulary(args.model))
    requests = [client.encode_request(key, PROMPT, TOKENS) for key in range(2 * STREAMS)]
    reference = [(await client.send(key, request)).text for key, request in enumerate(requests)]
    before = _left(supervisor)
    counts = {"requests": 0, "failed": 0, "altered": 0}
    errors: list[str] = []
    killer = _Killer(server, args.kills, args.every, lambda: counts["requests"])
    killer.start()

    async def run_streams(number: int) -> None:
        key = number
        while killer.is_alive():
            stream = await client.send(key, requests[key])
            counts["requests"] += 1
            if not stream.is_complete(TOKENS):
                counts["failed"] += 1
                errors.append(f"{stream.error or 'short'} after {len(stream.text)} characters")
            counts["altered"] += not stream.error and stream.text != reference[key]
            key = (key + 1) % len(requests)

    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(run_streams(number))
    await asyncio.sleep(3)
    after = _left(supervisor)
    again_s = {
        name: round(quantile(killer.again_s, share), 3)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))
    }
    left = {key: round(after[key] - before[key], 1) for key in before}
    return {**counts, "errors": errors, "kills": len(killer.again_s), "again_s": again_s, **left}


class _Killer(threading.Thread):
    """Kills a ready worker and waits until its place serves again and the next one stands by.

    As many requests as there are streams end between two kills. A request is refused when three
    workers in a row die before its next token, which is slow on a busy machine.
    """

    def __init__(
        self, server: Server, kills: int, every_s: float, count_requests: Callable[[], int]
    ) -> None:
        super().__init__(daemon=True)
        self._deployment = deployment_of(server)
        self._count_requests = count_requests
        self._kills, self._every_s = kills, every_s
        self.again_s: list[float] = []

    def run(self) -> None:
        rng = random.Random(0)
        for _ in range(self._kills):
            victim = rng.choice(ready(self._deployment, "worker"))
            os.kill(victim.pid, signal.SIGKILL)
            killed = now()
            while not any(
                record.name == victim.name and record.pid != victim.pid
                for record in ready(self._deployment, "worker")
            ):
                time.sleep(0.005)
            self.again_s.append(now() - killed)
            ended = self._count_requests()
            while self._count_requests() < ended + STREAMS:
                time.sleep(0.05)
            time.sleep(self._every_s * rng.uniform(0.5, 1.5))
            while any(
                "standby" in record.name and record.state != "standby"
                for record in self._deployment.live_processes()
            ):
                time.sleep(0.1)


def _left(supervisor: int) -> dict[str, float]:
    """Count what a supervisor holds: descriptors, processes, and MB of all."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    pids = [supervisor, *map(int, children)]
    descriptors = len(list(Path(f"/proc/{supervisor}/fd").iterdir()))
    return {"descriptors": descriptors, "processes": len(pids), "mb": pss_mb(pids)}


CASES = {
    "start": case_start,
    "decode": case_decode,
    "kills": case_kills,
    "peers": case_peers,
    "snapshot": case_snapshot,
}


def case_parser(description: str | None, cases: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Return a parser of the flags `--case` and `--model`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=cases, action="append")
    parser.add_argument("--model", default="", help="folder; default: the default model")
    return parser


def run_cases(args: argparse.Namespace, cases: Mapping[str, Any]) -> int:
    """Run the chosen cases in a state folder of their own and return the exit code."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_RUNTIME_DIR"] = state
        return max(cases[name](args).exit_code for name in args.case or cases)


def main() -> int:
    """Run the cases and print their results."""
    parser = case_parser(__doc__, CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--every", type=float, default=1, help="seconds from serving to a kill")
    parser.add_argument("more", nargs="*", help="further flags of dynamo run, for kills")
    return run_cases(parser.parse_args(), CASES)


if __name__ == "__main__":
    sys.exit(main())
