#!/usr/bin/env python3
"""Compare the stories and the traces of requests with what their client measured.

    benchmarks/story_truth.py --model DIR [--requests 1800] [--scenes kv,moved,...] [--priority normal]

Each scene is a deployment that gets requests of all surfaces: chats, completions, Responses (also in
the background) and Messages, streamed and whole, and embeddings. Some have two choices, some are cut
off by the client, some are refused. The observer must know each of them, and export one trace for each:
one root, no orphan, children within their parents. The target is that the stages of a story sum up to it
within 1 ms. At the 99th percentile, the times to the first text and to the end must agree with the
client's clock within 2 ms. With the priority "real-time" (needs root), client and frontend do not wait for
other programs of the machine, nor for the workers. On a busy machine they do for some ms, nevertheless:
so three of 14 requests are controls, to a server that does nothing but tell its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from processes import Killer, deployment_of, ready
from servers import Server, answers, free_port
from story_client import CHATS, CONTROL, EMBEDDINGS, Sent, Task, send_all, serve_control
from targets import Targets

ROUND = 1_000
"""Requests after which stories are read: the observer keeps the last 2,000."""
AT_ONCE = 4
KILL_EVERY_S = 2.0
HOUR_S = 3_600
TIMING = ("--timing", "constant:0.05,4")
SHIFT = f"""
import time
wall, monotonic = time.time, time.monotonic
time.time = lambda: wall() + {HOUR_S}
time.monotonic = lambda: monotonic() + {HOUR_S}
"""
"""A module `sitecustomize` of workers whose clocks are an hour off."""


class Scene(NamedTuple):
    """A deployment. `killed`: workers are killed while requests are in flight. `shifted`: workers
    of a command of their own have clocks that are an hour off. `words`: of a prompt."""

    mode: str = "kv"
    flags: tuple[str, ...] = ("--workers", "2", *TIMING)
    engine: str = "mock"
    model: str = "smol"
    kinds: tuple[str, ...] = (*CHATS, CONTROL, CONTROL, CONTROL)
    killed: bool = False
    shifted: bool = False
    words: tuple[int, int] = (5, 300)

    def models(self, folder: str) -> tuple[str, ...]:
        """Return the models as arguments of `dynamo run`."""
        if self.engine == "native":
            return (self.model, "minilm")
        return (folder, "--model-name", self.model)


BUSY = Scene().flags
SCENES = {
    "round_robin": Scene("round_robin"),
    "kv": Scene(),
    "tiers": Scene(flags=(*BUSY, "--num-blocks", "200", "--kv-host-size", "64MB")),
    "disaggregated": Scene(flags=(*BUSY, "--prefill-workers", "1", "--disagg", "always")),
    "moved": Scene(killed=True),
    "shifted": Scene(shifted=True),
    "native": Scene(
        flags=("--workers", "1"),
        engine="native",
        model="SmolLM2-135M-Instruct",
        kinds=(*CHATS, EMBEDDINGS, EMBEDDINGS, CONTROL, CONTROL, CONTROL),
        words=(2, 12),
    ),
}


def read_stories(server: Server) -> dict[str, dict[str, Any]]:
    """Return the stories by the client's request id."""
    observer = ready(deployment_of(server), "observer")[0]
    with urllib.request.urlopen(f"{observer.address}/requests?limit=4000", timeout=60) as answer:
        return {story["client_id"]: story for story in json.load(answer)["requests"]}


@contextlib.contextmanager
def collector() -> Iterator[list[bytes]]:
    """Receive traces as a collector does, and yield the bodies."""
    bodies = list[bytes]()

    class Handler(BaseHTTPRequestHandler):
        """Keeps what is sent."""

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{http.server_port}"
        os.environ["OTEL_TRACES_SAMPLER"] = "always_on"
        yield bodies
        http.shutdown()


def count_faults(bodies: Sequence[bytes]) -> tuple[int, Counter[str]]:
    """Return the number of traces, and what is wrong with them."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    traces, faults = defaultdict[bytes, list[Any]](list), Counter[str]()
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    traces[span.trace_id].append(span)
    for spans in traces.values():
        by_id = {span.span_id: span for span in spans}
        faults["span twice"] += len(spans) - len(by_id)
        roots = sum(not span.parent_span_id for span in spans)
        faults["not one root"] += roots != 1
        for span in spans:
            faults["ends before it begins"] += span.end_time_unix_nano < span.start_time_unix_nano
            parent = by_id.get(span.parent_span_id)
            if parent is None:
                faults["orphan"] += bool(span.parent_span_id)
                continue
            faults["outside of its parent"] += (
                span.start_time_unix_nano < parent.start_time_unix_nano
                or span.end_time_unix_nano > parent.end_time_unix_nano
            )
    return len(traces), faults


@contextlib.contextmanager
def deployment(scene: Scene, model: str) -> Iterator[Server]:
    """Run the deployment of a scene."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SHIFT)
        port, plane = free_port(), ("--discovery", f"file:{folder}/plane")
        env = os.environ | {"DYNAMO_SECURITY__SECRET": "a secret of this benchmark alone"}
        frontend = ("--http-port", str(port), "--router-mode", scene.mode)
        workers = (f"out={scene.engine}", *scene.models(model), *scene.flags)
        commands = [(env, (*workers, *frontend))]
        if scene.shifted:
            late = env | {"PYTHONPATH": folder}
            workers = ("in=none", *workers, "--deployment", f"late-{port}", *plane)
            commands = [(late, workers), (env, ("--workers", "0", *frontend, *plane))]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        children = [
            subprocess.Popen((sys.executable, "-m", "dynamo", "run", *words), env=each, **quiet)
            for each, words in commands
        ]
        server = Server(f"http://127.0.0.1:{port}", [], [], children)
        try:
            answers(server.url, scene.model, children)
            yield server
        finally:
            server.stop()


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send the requests of a scene, and compare them with their stories."""
    scene, result, port = SCENES[name], Comparison(), free_port()
    with (
        collector() as bodies,
        deployment(scene, args.model) as server,
        ProcessPoolExecutor(1, get_context("spawn")) as client,
    ):
        control = get_context("spawn").Process(target=serve_control, args=[port], daemon=True)
        control.start()
        if args.priority == "real-time":
            frontend = ready(deployment_of(server), "frontend")[0].pid
            threads = [path.name for path in Path(f"/proc/{frontend}/task").iterdir()]
            for thread in (*threads, client.submit(os.getpid).result(), control.pid):
                os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
        time.sleep(2.5)
        bodies.clear()
        for start in range(0, args.requests, ROUND):
            names = [f"t{at}" for at in range(start, min(args.requests, start + ROUND))]
            killer = Killer(deployment_of(server), ("worker",), KILL_EVERY_S, 1)
            if scene.killed:
                killer.start()
            task = Task(
                server.url, port, scene.model, names, scene.kinds, scene.words, args.at_once
            )
            sent = client.submit(send_all, task).result()
            if scene.killed:
                killer.stop()
            time.sleep(2.5)
            result.add(sent, read_stories(server))
            result.kills += len(killer.kills)
        control.kill()
        time.sleep(1)
        traces, faults = count_faults(bodies)
    return {
        **result.summary(),
        "traces": traces,
        "wrong_spans": +faults,
    }


class Comparison:
    """Differences between a client's times and stories, in ms and with their sign."""

    def __init__(self) -> None:
        self.kills = self._missing = self._moved = 0
        self._sums, self._controls = [0.0], list[float]()
        self._requests = 0
        self._firsts = defaultdict[str, list[float]](list)
        self._ends = defaultdict[str, list[float]](list)

    def add(self, sent: Sequence[Sent], stories: dict[str, dict[str, Any]]) -> None:
        """Compare requests with their stories."""
        for request in sent:
            if request.surface == CONTROL:
                self._controls.append((request.seconds - float(request.answer)) * 1e3)
                continue
            self._requests += 1
            story = stories.get(request.name)
            if story is None:
                self._missing += 1
                continue
            seconds, first_s = story["seconds"], story["ttft"]
            stages = sum(stage["seconds"] for stage in story["stages"])
            self._sums.append(abs(stages - seconds) * 1e3)
            self._ends[request.surface].append((request.seconds - seconds) * 1e3)
            streamed = request.surface.endswith(("stream", "n", "background"))
            if streamed and first_s is not None and request.first_s is not None:
                self._firsts[request.surface].append((request.first_s - first_s) * 1e3)

    def summary(self) -> dict[str, Any]:
        """Return the results."""
        return {
            "requests": self._requests,
            "missing": self._missing,
            "kills": self.kills,
            "stages_ms": max(self._sums),
            "first_p99_ms": p99(self._firsts),
            "end_p99_ms": p99(self._ends),
            "first_ms": describe(self._firsts),
            "end_ms": describe(self._ends),
            "control_p99_ms": p99({CONTROL: self._controls}),
        }


def p99(values: dict[str, list[float]]) -> float:
    """Return the 99th percentile of all absolute values."""
    ordered = sorted(abs(value) for each in values.values() for value in each)
    return ordered[int(len(ordered) * 0.99)] if ordered else 0.0


def describe(values: dict[str, list[float]]) -> dict[str, str]:
    """Return the median and the 99th percentile by surface."""
    return {
        name: f"{median(each):.2f}, p99 {p99({name: each}):.2f}" for name, each in values.items()
    }


def main() -> None:
    """Print a line for each scene, and check the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--requests", type=int, default=1_800, help="of each scene")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--priority", choices=("real-time", "normal"), default="real-time")
    args = parser.parse_args()
    targets, results = Targets(), dict[str, Any]()
    for name in args.scenes.split(","):
        result = results[name] = run(name, args)
        print(name, json.dumps(result), flush=True)
        targets.at_most(f"{name}: requests without a story", result["missing"], 0)
        targets.at_most(f"{name}: stages beside the whole, ms", result["stages_ms"], 1.0)
        for what in ("first", "end"):
            beyond_ms = result[f"{what}_p99_ms"] - result["control_p99_ms"]
            targets.at_most(f"{name}: {what}, p99 ms beyond controls", beyond_ms, 2.0)
        targets.at_least(f"{name}: traces", result["traces"], result["requests"])
        targets.at_most(f"{name}: wrong spans", sum(result["wrong_spans"].values()), 0)
    targets.print_report(results, "stories")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
