#!/usr/bin/env python3
"""Measure what mode kv costs a frontend per request compared with round robin, with 256 in flight.

    benchmarks/kv_request.py [--workers 4 64] [--requests 6000] [--tokens 158] [--fresh 12]

Runs the policy, router, recorder, replica sync, KV events and load reports of a frontend in virtual
time, without sockets. In every step, workers answer the oldest requests. Prints CPU microseconds and
calls of Python functions per request, minus those of round robin.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
from kv_decision import BLOCK, ENGINE, IgnoringReply

from dynamo.communication.events import Event
from dynamo.core.context import Context
from dynamo.core.hashing import block_hashes
from dynamo.core.kv_events import encode_kv_events
from dynamo.core.reply import Reply
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import BlocksStored, GenerateRequest, Load, SamplingParams, StopConditions
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.processes.process import GC_THRESHOLDS
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.decision_metrics import DecisionMetrics
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.policies.kv import KvPolicy
from dynamo.scheduling.router.policy import Decision, Policy, PolicyInputs
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.router.router import WorkerRouter
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.telemetry import Registry

IN_FLIGHT = 256
STEP_S = 0.01
SUBJECT = "dynamo.worker"


class Workers:
    """A client's view of workers that never change."""

    path = f"{SUBJECT}.generate"

    def __init__(self, count: int) -> None:
        self.rng = random.Random(1)
        names = [f"{number:016x}" for number in range(count)]
        self.instances: Mapping[str, Instance] = {
            name: Instance(
                name, f"tcp://{name}", "dynamo", "worker", "generate", {"engine": ENGINE}
            )
            for name in names
        }

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Ignore the callback."""
        del callback
        return lambda: None


class RoundRobinPolicy(Policy):
    """Chooses the next worker."""

    def __init__(self, workers: Workers) -> None:
        self._all = list(workers.instances.values())
        self._next = 0

    async def choose(self, request: GenerateRequest, context: Context, tried: Any) -> Decision:
        del request, context, tried
        self._next = (self._next + 1) % len(self._all)
        return Decision(self._all[self._next], "round_robin", len(self._all))


class SimulatedFrontend:
    """A frontend's router, and workers that answer the `fresh` oldest requests in each step."""

    def __init__(self, clock: VirtualClock, args: argparse.Namespace, workers: int) -> None:
        self.args = args
        self.workers = Workers(workers)
        self.waiting: deque[tuple[Instance, GenerateRequest, Reply, asyncio.Future[None]]] = deque()
        self.view = CacheView(clock, block_tokens=BLOCK)
        self.loads = LoadView(clock)
        self.left = args.requests
        rng = random.Random(2)
        shared = [rng.randrange(49_000) for _ in range(BLOCK)]
        self.prompts = [
            array(
                "I", shared + [rng.randrange(49_000) for _ in range(args.tokens - BLOCK)]
            ).tobytes()
            for _ in range(args.requests)
        ]
        self.hashes = {ids: tuple(block_hashes(ids, BLOCK)) for ids in self.prompts}
        self.epochs = dict.fromkeys(self.workers.instances, 0)
        self.reported_s = 0.0

    def round_robin_router(self, clock: VirtualClock) -> WorkerRouter:
        """Return a router with the round-robin policy."""
        return WorkerRouter(RoundRobinPolicy(self.workers), self.send_to_worker, clock=clock)

    def kv_router(self, clock: VirtualClock) -> WorkerRouter:
        """Return the router of a frontend in mode kv."""
        ledger = Ledger(clock)
        ledger.workers.update_instances(self.workers.instances)
        placement = PlacementSolver(ledger, self.view, PredictedCost(), random.Random(3))
        client = cast("Client", self.workers)
        events: Any = None
        policy = KvPolicy(
            PolicyInputs(RouterSettings(), client, events, clock, ledger, BLOCK), placement
        )
        ReplicaSync(clock, "me", ledger)
        self.loads.add_listener(placement.worker_states.on_load_report)
        metrics = DecisionMetrics(Registry(), waiting=lambda: len(placement))
        return WorkerRouter(
            policy, self.send_to_worker, clock=clock, observers=(metrics,), ledger=ledger
        )

    async def send_to_worker(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Queue a request at its worker."""
        del context
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((instance, request, reply, done))
        await done

    async def client(self, router: WorkerRouter) -> None:
        """Send requests one after the other."""
        while self.left:
            self.left -= 1
            name = f"{self.left:032x}"
            ids = self.prompts[self.left]
            request = GenerateRequest(name, "m", ids, SamplingParams(), StopConditions(1))
            await router.send(request, Context(name), IgnoringReply())

    async def serve(self, clock: VirtualClock, kv: bool) -> None:
        """Run the steps of the workers."""
        while self.left or self.waiting:
            await clock.sleep(STEP_S)
            stored: dict[str, list[BlocksStored]] = {}
            for _ in range(min(self.args.fresh, len(self.waiting))):
                instance, request, reply, done = self.waiting.popleft()
                if kv:
                    first, *more = self.hashes[request.token_ids]
                    change = BlocksStored(first, tuple(more))
                    stored.setdefault(instance.id, []).append(change)
                reply.tokens((5,))
                done.set_result(None)
            for name, changes in stored.items():
                self.epochs[name] += 1
                payload = encode_kv_events(changes)
                self.view.on_event(
                    Event(f"{SUBJECT}.kv_events", name, 1, self.epochs[name], payload)
                )
            if kv and clock.now() - self.reported_s >= 0.1:
                self.reported_s = clock.now()
                report = msgspec.msgpack.encode(Load(running=3, total_blocks=65_536))
                for name in stored:
                    self.loads.update_scores(Event(f"{SUBJECT}.load_metrics", name, 1, 1, report))


def measure(args: argparse.Namespace, workers: int, kv: bool) -> tuple[float, float]:
    """Return the CPU microseconds and the calls per request."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        del frame, argument
        if event in {"call", "c_call"}:
            calls += 1

    async def main(clock: VirtualClock) -> float:
        frontend = SimulatedFrontend(clock, args, workers)
        router = frontend.kv_router(clock) if kv else frontend.round_robin_router(clock)
        gc.collect()
        gc.freeze()
        if args.calls:
            sys.setprofile(count)
        start = time.process_time()
        clients = [frontend.client(router) for _ in range(IN_FLIGHT)]
        await run_all(frontend.serve(clock, kv), *clients)
        seconds = time.process_time() - start
        sys.setprofile(None)
        gc.unfreeze()
        return seconds

    return run_in_virtual_time(main) / args.requests * 1e6, calls / args.requests


def main() -> None:
    """Print a line for each number of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--requests", type=int, default=6_000)
    parser.add_argument("--tokens", type=int, default=158)
    parser.add_argument("--fresh", type=int, default=12, help="answers a step of 10 ms")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable()
    gc.set_threshold(*GC_THRESHOLDS)
    for workers in args.workers:
        args.calls = True
        calls = measure(args, workers, kv=True)[1] - measure(args, workers, kv=False)[1]
        args.calls = False
        seconds = []
        for _ in range(args.rounds):
            plain = measure(args, workers, kv=False)[0]
            seconds.append(measure(args, workers, kv=True)[0] - plain)
        median, least = statistics.median(seconds), min(seconds)
        print(f"{workers:4d} workers: {median:5.0f} us (least {least:.0f}), {calls:5.0f} calls")


if __name__ == "__main__":
    main()
