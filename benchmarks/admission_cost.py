#!/usr/bin/env python3
"""Measure the CPU cost of admission for a request that need not wait, with and without a TTFT SLO.

    benchmarks/admission_cost.py

Prints medians of 15 runs of 2,000 requests over 4 and 64 workers that answer immediately.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import cycle
from math import inf
from typing import Any, cast

import msgspec

from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.reply import LogprobsPerToken, Reply, SendRequest
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission import Admission
from dynamo.scheduling.pipeline import chain
from dynamo.scheduling.router import Decision, Policy, WorkerRouter
from dynamo.scheduling.workers.ledger import Ledger

REQUESTS, RUNS = 2_000, 15
INFO = EngineInfo("mock", 16, 16_384, 32_768, 256, 8_192)
STARTED, FINISHED = Started("w", 0, 256), Finish("length", 60)
REQUEST = GenerateRequest("1", "m", bytes(1_024), SamplingParams(), StopConditions(max_tokens=60))
CONTEXT = Context("1", timeout_s=300.0)


class IgnoringReply(Reply):
    """Ignores the answer."""

    __slots__ = ()

    def begin(self, started: Started) -> None:
        del started

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del ids, logprobs
        return True

    def finish(self, end: Finish) -> None:
        del end


class RoundRobinPolicy(Policy):
    """Chooses the instances in turn."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._instances = cycle(instances)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        """Return the next instance."""
        del request, context, tried
        return Decision(next(self._instances), "round_robin", 1)


class Workers:
    """The part of a Client that admission uses."""

    def __init__(self, count: int) -> None:
        capabilities = {"engine": msgspec.to_builtins(INFO)}
        self.instances: Mapping[str, Instance] = {
            str(number): Instance(
                id=str(number),
                address=f"memory://{number}",
                namespace="n",
                component="worker",
                endpoint="generate",
                capabilities=capabilities,
            )
            for number in range(count)
        }

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Ignore the callback, since the workers never change."""
        return callback


async def answer_immediately(
    instance: Instance, request: GenerateRequest, context: Context, reply: Reply
) -> None:
    """Send a complete answer."""
    del instance, request, context
    reply.begin(STARTED)
    reply.tokens((1,))
    reply.finish(FINISHED)


async def us_per_request(send: SendRequest) -> float:
    """Return the CPU microseconds of a request through `send`."""
    reply = IgnoringReply()
    times = []
    for _ in range(RUNS):
        started = time.process_time()
        for _ in range(REQUESTS):
            await send(REQUEST, CONTEXT, reply)
        times.append((time.process_time() - started) / REQUESTS * 1e6)
    return statistics.median(times)


async def admission_us(number: int, ttft_s: float) -> float:
    """Return the microseconds that admission adds with `number` workers."""
    workers = Workers(number)
    ledger, plain_ledger = Ledger(), Ledger()
    for each in (ledger, plain_ledger):
        each.workers.update_instances(workers.instances)
    limits = RouterSettings(ttft_slo=ttft_s)
    admission = Admission(cast("Any", workers), ledger, None, SystemClock(), limits)
    plain = WorkerRouter(
        RoundRobinPolicy(workers.instances.values()), answer_immediately, ledger=plain_ledger
    )
    tracked = WorkerRouter(
        RoundRobinPolicy(workers.instances.values()),
        answer_immediately,
        ledger=ledger,
    )
    without = await us_per_request(plain.send)
    return await us_per_request(chain([admission], tracked.send)) - without


async def main() -> None:
    """Print the cost for each number of workers and SLO."""
    for number in (4, 64):
        for ttft_s in (inf, 2.0):
            cost_us = await admission_us(number, ttft_s)
            print(f"{number} workers, TTFT SLO {ttft_s:g} s: {cost_us:.1f} us per request")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(main())
