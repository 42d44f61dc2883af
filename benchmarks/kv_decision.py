#!/usr/bin/env python3
"""Measure the CPU of a whole routing decision: hash, match, cost, choose, explain.

    benchmarks/kv_decision.py [--tokens 8192] [--workers 8 64 512] [--active 16] [--rounds 300]

Prints medians. Every worker has `--active` requests in flight and holds a part of the prompts' blocks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Sequence

from dynamo.core.clock import SystemClock
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.values import (
    BlocksStored,
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.prompt import Prompt, make_prompt_reader
from dynamo.scheduling.router.worker_state import PlacedRequest
from dynamo.scheduling.router.worker_states import WorkerStates

BLOCK = 16
ENGINE = {
    "engine": "mock",
    "block_tokens": BLOCK,
    "num_blocks": 65_536,
    "context_tokens": 131_072,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8_192,
}


class IgnoringReply(Reply):
    """Ignores the answer."""

    def begin(self, started: Started) -> None:
        pass

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del ids, logprobs
        return True

    def finish(self, end: Finish) -> None:
        pass


def prompts(count: int, tokens: int, rng: random.Random) -> list[GenerateRequest]:
    """Return requests of conversations that share a system prompt, a quarter of their tokens."""
    shared = array("I", (rng.randrange(49_000) for _ in range(tokens // 4)))
    requests = []
    for number in range(count):
        own = array("I", (rng.randrange(49_000) for _ in range(tokens - len(shared))))
        ids = (shared + own).tobytes()
        requests.append(GenerateRequest(f"r{number}", "m", ids, SamplingParams(), StopConditions()))
    return requests


def make_worker_states(workers: int, active: int, rng: random.Random, now: float) -> WorkerStates:
    """Return the states of workers with requests in flight."""
    states = WorkerStates()
    names = [f"w{number}" for number in range(workers)]
    states.update_instances({n: Instance(n, n, "n", "c", "e", {"engine": ENGINE}) for n in names})
    for worker in states.workers:
        for number in range(active):
            placed = PlacedRequest(f"{worker.name}/{number}", worker, Prompt(2_000, ()), 500, now)
            worker.place(placed, now)
            worker.on_first_token(placed, now + 0.01)
            placed.emitted = rng.randrange(1, 400)
    return states


def decide(workers: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return the median and the 99th percentile in microseconds."""
    rng, clock = random.Random(7), SystemClock()
    states = make_worker_states(workers, args.active, rng, clock.now())
    view = CacheView(clock, block_tokens=BLOCK)
    read = make_prompt_reader(BLOCK)
    requests = prompts(args.rounds, args.tokens, rng)
    for request in requests:
        hashes = read(request).hashes
        for worker in rng.sample(states.workers, min(4, workers)):
            cached = hashes[: rng.randrange(len(hashes) // 4, len(hashes))]
            view.apply(worker.name, [BlocksStored(0, tuple(cached))])
    placement = PlacementSolver(states, view, PredictedCost(), rng)
    times_us = []
    now = clock.now()
    for request in requests:
        now += 0.2
        start = time.process_time_ns()
        pending = PendingRequest(request.request_id, read(request), BLOCK, now)
        placement.submit(pending)
        (placed,) = placement.place(now)
        times_us.append((time.process_time_ns() - start) / 1e3)
        placement.on_first_token(placed.placed, now + 0.1)
        placement.on_ended(placed.placed, now + 0.1)
    times_us.sort()
    return statistics.median(times_us), times_us[int(len(times_us) * 0.99)]


def main() -> None:
    """Print a line for each number of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--active", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    for workers in args.workers:
        median, high = decide(workers, args)
        print(f"{workers:4d} workers, {args.tokens} tokens: {median:6.0f} us (p99 {high:.0f})")


if __name__ == "__main__":
    main()
