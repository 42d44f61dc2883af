#!/usr/bin/env python3
"""Measure the CPU and the memory of an observer without a deployment.

    benchmarks/observer_cost.py [--workers 512] [--stories 6000] [--idle SECONDS]

Batches as frontends publish them are decoded, kept, judged by their promise and exported as spans
to nowhere, with every ring full and a sample of all workers a second. Targets: 150 us of CPU for a
traced request, and 80 MB in all with 512 workers.

`--idle` instead runs an observer process among workers without requests: leases of their own in a
discovery folder, and one load report each, by TCP. Target: under 1 % of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
from msgspec.structs import replace
from targets import Targets

from dynamo.communication.discovery.folder import FolderLease
from dynamo.communication.http import raise_open_file_limit
from dynamo.core.clock import SystemClock
from dynamo.core.kv_events import LOAD_METRICS_SUBJECT, model_subject
from dynamo.core.settings import Settings
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Load, TierLoad
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.operations.observer.spans import SpanEncoder
from dynamo.operations.observer.stories import KeptStory
from dynamo.runtime.deployment import live_processes
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process import GC_THRESHOLDS
from dynamo.services.model_pipeline import WORKER_COMPONENT
from dynamo.services.observing import observer as _whole_process  # noqa: F401 - its memory counts
from dynamo.telemetry.story import (
    AttemptFacts,
    Candidate,
    EndedStory,
    ProcessSample,
    StoryBatch,
    decode_batch,
    encode_batch,
)

BATCH = 500
TABLES = 32
SAMPLES = 900


class SetClock(SystemClock):
    """A clock that stands at the time `wall_s`."""

    wall_s = 0.0

    def wall(self) -> float:  # type: ignore[override]
        return self.wall_s


def make_story(number: int, workers: int, rng: random.Random, wall_s: float) -> EndedStory:
    """Return a story with one attempt, or two for every tenth."""
    attempts = [
        _make_attempt(number, at, workers, rng) for at in range(2 if not number % 10 else 1)
    ]
    return EndedStory(
        f"{number:032x}", f"client-{number}", f"{rng.getrandbits(128):032x}",
        "/v1/chat/completions", "a-model", "", wall_s, 100, 0, 500, 51_000, 152_000, 9_000, 0, "",
        0, 0, 1, 1, 640, 320, 10, rng.getrandbits(32), 0, attempts,
    )  # fmt: skip


def _make_attempt(number: int, at: int, workers: int, rng: random.Random) -> AttemptFacts:
    names = [f"worker-{rng.randrange(workers)}-0123456789" for _ in range(8)]
    costs = [Candidate(name, 3, 12.5, {"queue": 1.0, "prefill": 11.5}) for name in names]
    times = WorkerTimes(0.001, 2, 900, 0.0, "", 0.04, 0.1, 0.01, 0, 0, None, None, 500)
    return AttemptFacts(
        0, names[0], "", "kv", "exact", workers, 1_000, 1_100, 51_000, 151_000,
        "" if at or number % 10 else "worker_failed", "", 0, 3, 1, 640, 40, 20, 22, 25, 320, 10,
        100, 48_000, None, 0.0, times, costs if number % BATCH < TABLES else (),
        f"{number:032x}/0/{at}",
    )  # fmt: skip


def resident_mb(process: str | int = "self") -> float:
    """Return the memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(workers: int, stories: int) -> dict[str, Any]:
    """Feed an observer, and return its costs."""
    rng, clock = random.Random(1), SetClock()
    idle_mb = resident_mb()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)  # as every process of a deployment does
    observer, encoder = DeploymentObserver(clock), SpanEncoder({"service.name": "dynamo"}, {})
    names = [f"worker-{number}-0123456789" for number in range(workers)]
    load = Load(9, 3, 4096, 900, 2_000, 0, 1_500, tiers=(TierLoad("host", 0.1, 0.0, 30, 40),))
    loads = dict.fromkeys(names, load)
    spent = dict.fromkeys(("keep", "spans", "sample"), 0.0)
    wall_s = time.time()
    for start in range(0, stories, BATCH):
        batch = [make_story(n, workers, rng, wall_s) for n in range(start, start + BATCH)]
        wall_s += 1
        sample = ProcessSample(3, dict.fromkeys(names, 2), dict.fromkeys(names, "exact"))
        data = encode_batch(StoryBatch("frontend-1", wall_s, batch, sample=sample))
        del batch
        began = time.process_time()
        decoded = decode_batch(data)
        observer.on_batch(decoded)
        spent["keep"] += time.process_time() - began
        began = time.process_time()
        encoder.encode([KeptStory(story, "frontend-1") for story in decoded.stories])
        spent["spans"] += time.process_time() - began
    for at in range(SAMPLES):
        began = time.process_time()
        clock.wall_s = wall_s + at
        observer.sample(loads)
        spent["sample"] += time.process_time() - began
    return {
        "keep_us": spent["keep"] / stories * 1e6,
        "spans_us": spent["spans"] / stories * 1e6,
        "sample_ms": spent["sample"] / SAMPLES * 1e3,
        "imported_mb": idle_mb,
        "full_mb": resident_mb(),
    }


DEPLOYMENT = f"idle-{os.getpid()}"
OBSERVER_PROCESS = """
import sys, msgspec
from dynamo.core.settings import Settings
from dynamo.runtime.processes.process import run_process, tune_malloc
from dynamo.services.observing.observer import ObserverService
tune_malloc()
settings = msgspec.json.decode(sys.argv[1], type=Settings)
sys.exit(run_process(ObserverService().attach, settings, "observer"))
"""


async def measure_idle(workers: int, seconds: float) -> dict[str, Any]:
    """Run an observer among idle workers, and return its costs."""
    raise_open_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        root = Path(folder) / "discovery"
        settings = Settings()
        fields = replace(settings.runtime, discovery=f"file:{root}", deployment=DEPLOYMENT)
        settings = replace(settings, runtime=fields)
        runtime = await DistributedRuntime.create(settings, role="worker", name="workers")
        component = f"{settings.runtime.namespace}.{WORKER_COMPONENT}"
        subject = model_subject(component, LOAD_METRICS_SUBJECT, "a-model")
        report = msgspec.msgpack.encode(Load(0, 0, 0, 900, 2_000))
        leases = []
        for number in range(workers):
            name = f"worker-{number + 1}-{number:010x}"
            (await runtime.events.open_source(subject, name, latest=True)).publish(report)
            leases.append(FolderLease(root))
            for part in ("instance", "card", "source", "process"):
                leases[-1].put(f"/made-up/{part}/{name}", b"x" * 500)
        encoded = msgspec.json.encode(settings).decode()
        command = [sys.executable, "-P", "-c", OBSERVER_PROCESS, encoded]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            result = await _watch_idle(process.pid, workers, seconds)
        finally:
            process.terminate()
            process.wait()
        for lease in leases:
            lease.close()
        await runtime.shutdown(0)
    return result


async def _watch_idle(pid: int, workers: int, seconds: float) -> dict[str, Any]:
    """Return the costs of an observer once it knows all workers."""
    while await asyncio.to_thread(_known_workers) != workers:
        await asyncio.sleep(0.5)
    await asyncio.sleep(5)
    before, began = cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    share = (cpu_s(pid) - before) / (time.monotonic() - began)
    return {"workers": workers, "cpu_percent": share * 100, "resident_mb": resident_mb(pid)}


def _known_workers() -> int:
    with suppress(OSError, ValueError):  # the observer starts
        (observer,) = [record for record in live_processes() if record.deployment == DEPLOYMENT]
        with urlopen(f"{observer.address}/health", timeout=5) as answer:
            return int(json.load(answer)["workers"])
    return -1


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its threads in seconds."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def main() -> None:
    """Print the costs, and check the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--stories", type=int, default=6_000)
    parser.add_argument("--idle", type=float, metavar="SECONDS")
    args, targets = parser.parse_args(), Targets()
    if args.idle:
        result = asyncio.run(measure_idle(args.workers, args.idle))
        targets.at_most("an idle observer", result["cpu_percent"], 1, " % of a core")
        targets.print_report(result, "observer")
        raise SystemExit(targets.exit_code)
    result = run(args.workers, args.stories)
    print(json.dumps(result))
    targets.at_most("a traced request", result["keep_us"] + result["spans_us"], 150, " us")
    targets.at_most("memory with full rings", result["full_mb"], 80, " MB")
    targets.print_report(result, "observer")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
