#!/usr/bin/env python3
"""Measure the CPU of a whole routing decision (hash, match, cost, choose, explain), and a burst.

    benchmarks/kv_decision.py [--tokens 8192] [--workers 8 64 512 1000 10000] [--active 16]
                              [--rounds 300] [--idle 256 1000 4000] [--burst 200]
                              [--roles both | split | flexible]

Prints the median CPU of a decision. With `--roles split` every second worker only computes prompts, and with
`flexible` each worker may do so for the others. Then a decision is the choice of a pair. Every worker has `--active` requests in flight. Four workers hold a
part of each prompt, and either a few more or all of them hold the quarter that all prompts share. Then
`--burst` prompts come at one instant over idle workers, in virtual time. Their mean time to first token is
printed for mode kv and for round robin, beside the CPU of all decisions, which virtual time does not contain.
A decision may take 1 ms over up to 1,000 workers and 2 ms over more. The burst may take 1.1 times the mean of
round robin. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Self

from dynamo.core.clock import SystemClock
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.timing.model import DYNAMO_TIMING
from dynamo.core.values import (
    BlocksStored,
    EngineInfo,
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.placement.solver import PlacementResult, PlacementSolver
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt, make_prompt_reader

BLOCK = 16
ENGINE = {
    "engine": "mock",
    "block_tokens": BLOCK,
    "num_blocks": 65_536,
    "context_tokens": 131_072,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8_192,
}


BURST_TOKENS = 520
MAX_SMALL_US, MAX_LARGE_US, MAX_BURST_RATIO = 1_000, 2_000, 1.1


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


def make_cost(roles: str) -> Cost:
    """Return the cost of mode kv where workers have these roles."""
    if roles == "both":
        return PredictedCost()
    mode = "flexible" if roles == "flexible" else "predicted"
    return PairCost(DisaggregationSettings(mode=mode))


def make_ledger(workers: int, args: argparse.Namespace, rng: random.Random) -> Ledger:
    """Return a ledger of workers with requests in flight."""
    ledger, instances = Ledger(), {}
    ledger.follow_answers()
    for number in range(workers):
        roles = ["prefill"] if number % 2 else ["decode"]
        engine = ENGINE | ({"roles": roles} if args.roles == "split" else {})
        name = f"w{number}"
        instances[name] = Instance(name, name, "n", "c", "e", {"engine": engine})
    ledger.workers.update_instances(instances)
    for worker in ledger.workers.workers:
        for number in range(args.active if worker.decodes else 0):
            key = f"{worker.name}/{number}"
            placed = ledger.place(key, worker, Prompt(2_000, ()), new_tokens=500)
            ledger.first_token(placed)
            placed.emitted = rng.randrange(1, 400)
    return ledger


def decide(workers: int, args: argparse.Namespace, *, shared_by_all: bool) -> tuple[float, float]:
    """Return the median and the 99th percentile in microseconds."""
    rng, clock = random.Random(7), SystemClock()
    ledger = make_ledger(workers, args, rng)
    states = ledger.workers
    view = CacheView(clock, block_tokens=BLOCK)
    read = make_prompt_reader(BLOCK)
    requests = prompts(args.rounds, args.tokens, rng)
    for request in requests:
        hashes = read(request).hashes
        for worker in rng.sample(states.workers, min(4, workers)):
            cached = hashes[: rng.randrange(len(hashes) // 4, len(hashes))]
            view.apply(worker.name, [BlocksStored(0, tuple(cached))])
    if shared_by_all:
        shared = tuple(read(requests[0]).hashes[: args.tokens // 4 // BLOCK])
        for worker in states.workers:
            view.apply(worker.name, [BlocksStored(0, shared)])
    placement = PlacementSolver(ledger, view, make_cost(args.roles), rng)
    times_us = []
    now = clock.now()
    for request in requests:
        now += 0.2
        start = time.process_time_ns()
        pending = PendingRequest(request.request_id, read(request), BLOCK, now)
        placement.submit(pending)
        (placed,) = placement.place(now)
        times_us.append((time.process_time_ns() - start) / 1e3)
        ledger.first_token(placed.placed)
        ledger.end(placed.placed, None)
    times_us.sort()
    return statistics.median(times_us), times_us[int(len(times_us) * 0.99)]


class TimedPlacements:
    """Sums the CPU of all placements while it is entered."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.slowest_s = 0.0
        self._place = PlacementSolver.place

    def __enter__(self) -> Self:
        def place(solver: PlacementSolver, now: float) -> list[PlacementResult]:
            start = time.process_time()
            results = self._place(solver, now)
            took_s = time.process_time() - start
            self.cpu_s += took_s
            self.slowest_s = max(self.slowest_s, took_s)
            return results

        PlacementSolver.place = place  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        PlacementSolver.place = self._place  # type: ignore[method-assign]


def burst_ttft_ms(mode: str, workers: int, prompts: int, tokens: int) -> float:
    """Return the mean TTFT of prompts without common blocks that come at one instant."""
    blocks = 256
    info = EngineInfo("mock", BLOCK, blocks, blocks * BLOCK, 256, 8_192)
    cluster = ReplayWorkers([ReplayGroup(workers, info, DYNAMO_TIMING)], "reuse")
    requests = [TraceConversation(0.0, (TraceRequest(n, tokens, 20),)) for n in range(prompts)]
    plan = ReplayPlan("burst", cluster, RouterSettings(mode=mode), BLOCK)
    result, _ = Replay(plan).run(requests)
    return result.ttft_ms.mean


def main() -> int:
    """Print a line for each number of workers. Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 64, 512, 1_000, 10_000])
    parser.add_argument("--active", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--roles", choices=("both", "split", "flexible"), default="both")
    parser.add_argument("--idle", type=int, nargs="*", default=[256, 1_000, 4_000])
    parser.add_argument("--burst", type=int, default=200)
    args = parser.parse_args()
    logging.disable()
    missed = False
    for workers in args.workers:
        for shared_by_all in (False, True):
            median, high = decide(workers, args, shared_by_all=shared_by_all)
            missed |= median > (MAX_SMALL_US if workers <= 1_000 else MAX_LARGE_US)
            holders = "all workers hold" if shared_by_all else "some workers hold"
            print(
                f"{workers:5d} workers, {args.tokens} tokens, {holders} the shared part: "
                f"{median:5.0f} us (p99 {high:.0f})",
                flush=True,
            )
    for workers in args.idle:
        round_robin = burst_ttft_ms("round_robin", workers, args.burst, BURST_TOKENS)
        with TimedPlacements() as timed:
            kv = burst_ttft_ms("kv", workers, args.burst, BURST_TOKENS)
        missed |= kv > MAX_BURST_RATIO * round_robin
        print(
            f"{workers:5d} idle workers, {args.burst} prompts: mean TTFT {kv:.1f} ms, round robin "
            f"{round_robin:.1f}; all decisions {timed.cpu_s * 1e3:.1f} ms of CPU, the longest slice "
            f"{timed.slowest_s * 1e3:.1f}",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
