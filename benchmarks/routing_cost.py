#!/usr/bin/env python3
"""Measure the CPU around a routing decision: recording it, replicating it, querying a router process.

    benchmarks/routing_cost.py [--blocks 8,512] [--times 2000]

Prints the CPU microseconds per request, median of five rounds. Both ends of a process boundary count.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable
from statistics import median

from dynamo.core.clock import SystemClock
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.attempt import Attempt
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.decision_metrics import DecisionMetrics
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.policies.remote_messages import (
    decode_query,
    decode_reply,
    encode_query,
    encode_reply,
    read_query_prompt,
    request_from_query,
)
from dynamo.scheduling.router.policy import Decision
from dynamo.scheduling.router.queue import QueueOrderKey, WaitingQueue
from dynamo.scheduling.router.replicas.sync import (
    FirstTokenEmitted,
    ReplicaSync,
    RequestEnded,
    decode_routing_events,
    encode_routing_events,
    routed_event,
)
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.telemetry import Registry
from dynamo.telemetry.story import Candidate
from dynamo.testing.fakes import CollectedReply

WORKERS = {
    f"w{n}": Instance(f"w{n}", "tcp://h:1", "dynamo", "worker", "generate") for n in range(8)
}
REQUEST = GenerateRequest("0123456789abcdef00000001", "m", b"", SamplingParams(), StopConditions())
TABLE = tuple(
    Candidate(name, 3, 12.5, {"queue": 1.0, "prefill": 2.0, "harm": 3.0, "eviction": 4.0})
    for name in WORKERS
)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default="8,512")
    parser.add_argument("--times", type=int, default=2000)
    args = parser.parse_args()
    logging.disable()
    for blocks in map(int, args.blocks.split(",")):
        prompts = [[random.getrandbits(63) for _ in range(blocks)] for _ in range(args.times)]
        print(f"{blocks} blocks per prompt, us of CPU per request")
        for name, work in (
            ("an attempt (placed, counters, seen prefixes, facts)", record),
            ("replication to another router (routed, first token, ended)", replicate),
            ("query to a router process (both ends, no socket)", query),
            ("queue in the router, 1,000 waiting", queue_and_pop),
        ):
            print(f"  {name:<56}{_microseconds(work, prompts):8.1f}")


def record(prompts: list[list[int]]) -> None:
    """Count the blocks of a decision, and make the facts of its attempt."""
    metrics, ledger = DecisionMetrics(Registry()), Ledger()
    state = ledger.workers.at(WORKERS["w1"], None)
    for number, hashes in enumerate(prompts):
        prompt = Prompt(16 * len(hashes), hashes)
        decision = Decision(
            WORKERS["w1"],
            "predicted",
            8,
            lambda: TABLE,
            2,
            len(hashes),
            3,
            0.1,
            0.0,
            "exact",
            prompt=prompt,
        )
        placed = ledger.place(f"{number}/0/0", state, prompt, new_tokens=prompt.tokens)
        attempt = Attempt(CollectedReply(), placed, ledger, decision=decision)
        metrics.on_attempt_started(attempt)
        ledger.end(placed, None)
        metrics.on_attempt_ended(attempt)
        attempt.facts(0.0)


def replicate(prompts: list[list[int]]) -> None:
    """Encode routing events, decode them and apply them to a peer's state."""
    clock = SystemClock()
    own, other = Ledger(clock), Ledger(clock)
    for ledger in (own, other):
        ledger.workers.update_instances(WORKERS)
        PlacementSolver(ledger, CacheView(clock), PredictedCost(), random.Random(1))
    peer = ReplicaSync(clock, "other", other)
    for number, hashes in enumerate(prompts):
        prompt = Prompt(16 * len(hashes), hashes)
        placed = own.place(str(number), own.workers["w1"], prompt, new_tokens=1)
        for events in (
            [routed_event(placed)],
            [FirstTokenEmitted(placed.key)],
            [RequestEnded(placed.key, 64)],
        ):
            for event in decode_routing_events(encode_routing_events(events)):
                peer.apply("peer", event)
        own.end(placed, None)


def query(prompts: list[list[int]]) -> None:
    """Encode and decode a query and its reply."""
    decision = Decision(WORKERS["w1"], "predicted", 8, TABLE, 2, 4, 3, 0.1, 0.0, "exact")
    for hashes in prompts:
        ask = decode_query(encode_query(REQUEST, Prompt(len(hashes) * 16, hashes), ()))
        read_query_prompt(request_from_query(ask, "r"))
        decode_reply(encode_reply(decision))


def queue_and_pop(prompts: list[list[int]]) -> None:
    """Push and pop requests of the waiting queue."""
    queue: WaitingQueue[int] = WaitingQueue("shortest", bound=2000)
    for number in range(1000):
        queue.push(f"there {number}", number, QueueOrderKey(0.0, random.randrange(8000)))
    for number in range(len(prompts)):
        queue.push(str(number), number, QueueOrderKey(1.0, random.randrange(8000)))
        queue.pop(str(number), 1.0)


def _microseconds(work: Callable[[list[list[int]]], None], prompts: list[list[int]]) -> float:
    rounds = []
    for _ in range(5):
        start = time.process_time()
        work(prompts)
        rounds.append((time.process_time() - start) / len(prompts) * 1e6)
    return median(rounds)


if __name__ == "__main__":
    main()
