#!/usr/bin/env python3
"""CPU of what stands around a routing decision: watching it, telling other routers, asking one.

    benchmarks/routing_cost.py [--blocks 8,512] [--times 2000]

Microseconds of CPU a request, median of five rounds; both ends of what crosses a process boundary.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable
from statistics import median

from dynamo.core.clock import SystemClock
from dynamo.core.values import GenerateRequest, Sampling, Stops
from dynamo.runtime.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.explain.watch import RoutingWatch
from dynamo.scheduling.router.placing.costs import PredictedCost
from dynamo.scheduling.router.placing.fleet import Active, Fleet
from dynamo.scheduling.router.placing.placement import Placement
from dynamo.scheduling.router.placing.waiting import Rank, WaitingQueue
from dynamo.scheduling.router.policy import Candidate, Decision, Outcome, Ticket
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.remote.messages import (
    decode_answer,
    decode_ask,
    encode_answer,
    encode_ask,
    read_asked,
    request_of,
)
from dynamo.scheduling.router.replicas.follower import BookFollower
from dynamo.scheduling.router.replicas.moves import (
    Ended,
    FirstToken,
    Routed,
    decode_moves,
    encode_moves,
)
from dynamo.scheduling.router.replicas.replicas import move_of
from dynamo.telemetry import Registry

WORKERS = {
    f"w{n}": Instance(f"w{n}", "tcp://h:1", "dynamo", "worker", "generate") for n in range(8)
}
REQUEST = GenerateRequest("0123456789abcdef00000001", "m", b"", Sampling(), Stops())
OUTCOME = Outcome(0.05, 0.5, 64, 128, 64)
TABLE = tuple(
    Candidate(name, 3, 12.5, {"queue": 1.0, "prefill": 2.0, "harm": 3.0, "eviction": 4.0})
    for name in WORKERS
)


class Place(Ticket):
    """As the router's own: it holds the prompt's blocks."""

    def __init__(self, hashes: list[int]) -> None:
        super().__init__()
        self.hashes = hashes


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default="8,512")
    parser.add_argument("--times", type=int, default=2000)
    found = parser.parse_args()
    logging.disable()
    for blocks in map(int, found.blocks.split(",")):
        prompts = [[random.getrandbits(63) for _ in range(blocks)] for _ in range(found.times)]
        print(f"{blocks} blocks a prompt, us of CPU a request")
        for name, work in (
            ("watched (explanation, counters, record, seen prefixes)", watched),
            ("told to another router (routed, first token, ended)", told),
            ("asked of a router of its own (both ends, no socket)", asked),
            ("queued in the router, 1,000 waiting", queued),
        ):
            print(f"  {name:<56}{_microseconds(work, prompts):8.1f}")


def watched(prompts: list[list[int]]) -> None:
    """`RoutingWatch`, decision and outcome."""
    watch = RoutingWatch(SystemClock(), Registry())
    worker = WORKERS["w1"]
    for number, hashes in enumerate(prompts):
        request = GenerateRequest(str(number), "m", b"", Sampling(), Stops())
        made = Decision(
            worker, "predicted", 8, TABLE, 2, len(hashes), 3, 0.1, 0.0, "exact", Place(hashes)
        )
        watch.decided(request, made)
        watch.ended(request, made, OUTCOME)


def told(prompts: list[list[int]]) -> None:
    """Moves encoded here, decoded and booked there."""
    clock = SystemClock()
    fleet = Fleet()
    fleet.replace(WORKERS)
    placement = Placement(fleet, CacheView(clock), PredictedCost(), random.Random(1))
    follower = BookFollower(placement, clock, lambda: None)
    for number, hashes in enumerate(prompts):
        own = Active(str(number), fleet["w1"], Prompt(16 * len(hashes), hashes), 1, 0.0)
        for moves in ([move_of("w1", own)], [FirstToken(own.id)], [Ended(own.id, 64)]):
            for move in decode_moves(encode_moves(moves)):
                if isinstance(move, Routed):
                    follower.routed("peer", move)
                elif isinstance(move, FirstToken):
                    follower.first_token("peer", move.name)
                elif isinstance(move, Ended):
                    follower.ended("peer", move.name, move.emitted)


def asked(prompts: list[list[int]]) -> None:
    """Question and answer, encoded and decoded."""
    made = Decision(WORKERS["w1"], "predicted", 8, TABLE, 2, 4, 3, 0.1, 0.0, "exact")
    for hashes in prompts:
        ask = decode_ask(encode_ask(REQUEST, Prompt(len(hashes) * 16, hashes), ()))
        read_asked(request_of(ask, "r"))
        decode_answer(encode_answer(made))


def queued(prompts: list[list[int]]) -> None:
    """In and out."""
    queue: WaitingQueue[int] = WaitingQueue("shortest", bound=2000)
    for number in range(1000):
        queue.push(f"there {number}", number, Rank(0.0, random.randrange(8000)))
    for number in range(len(prompts)):
        queue.push(str(number), number, Rank(1.0, random.randrange(8000)))
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
