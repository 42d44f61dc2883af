#!/usr/bin/env python3
"""Measure the CPU and the memory of an observer without a deployment.

    benchmarks/observer_cost.py [--workers 512] [--stories 6000]

Batches as frontends publish them are decoded, kept, judged by their promise and exported as spans
to nowhere, with every ring full and a sample of all workers a second. Targets: 150 us of CPU for a
traced request, and 80 MB in all with 512 workers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from targets import Targets

from dynamo.core.clock import SystemClock
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Load, TierLoad
from dynamo.operations.observer.observer import DeploymentObserver
from dynamo.operations.observer.spans import SpanEncoder
from dynamo.operations.observer.stories import KeptStory
from dynamo.runtime.processes.process import GC_THRESHOLDS
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


def resident_mb() -> float:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
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


def main() -> None:
    """Print the costs, and check the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--stories", type=int, default=6_000)
    args = parser.parse_args()
    targets, result = Targets(), run(args.workers, args.stories)
    print(json.dumps(result))
    targets.at_most("a traced request", result["keep_us"] + result["spans_us"], 150, " us")
    targets.at_most("memory with full rings", result["full_mb"], 80, " MB")
    targets.print_report(result, "observer")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
