#!/usr/bin/env python3
"""What admission costs a request that need not wait, with and without a promise.

    benchmarks/admission_cost.py

CPU time; medians of 15 runs of 2,000 requests over 4 and 64 workers that answer at once.
"""

from __future__ import annotations

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
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission import Admission, SloLimits
from dynamo.scheduling.pipeline import chain
from dynamo.scheduling.router import Decision, Policy, WorkerRouter

REQUESTS, RUNS = 2_000, 15
INFO = EngineInfo("mock", 16, 16_384, 32_768, 256, 8_192)
STARTED, FINISHED = Started("w", 0, 256), Finish("length", 60)
REQUEST = GenerateRequest("1", "m", bytes(1_024), SamplingParams(), StopConditions(max_tokens=60))
CONTEXT = Context("1", timeout_s=300.0)


class Nobody(Reply):
    """Takes everything."""

    __slots__ = ()

    def begin(self, started: Started) -> None:
        del started

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del ids, logprobs
        return True

    def finish(self, end: Finish) -> None:
        del end


class Turns(Policy):
    """One instance after the other."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._turns = cycle(instances)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        """The next."""
        del request, context, tried
        return Decision(next(self._turns), "turns", 1)


class Workers:
    """As much of a Client as admission wants."""

    def __init__(self, number: int) -> None:
        about = {"engine": msgspec.to_builtins(INFO)}
        self.instances: Mapping[str, Instance] = {
            str(at): Instance(
                id=str(at),
                address=f"memory://{at}",
                namespace="n",
                component="worker",
                endpoint="generate",
                capabilities=about,
            )
            for at in range(number)
        }

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Nothing changes."""
        return callback


async def answer(
    instance: Instance, request: GenerateRequest, context: Context, reply: Reply
) -> None:
    """At once."""
    del instance, request, context
    reply.begin(STARTED)
    reply.tokens((1,))
    reply.finish(FINISHED)


async def us_a_request(send: SendRequest) -> float:
    """Of that way."""
    reply = Nobody()
    took = []
    for _ in range(RUNS):
        began = time.process_time()
        for _ in range(REQUESTS):
            await send(REQUEST, CONTEXT, reply)
        took.append((time.process_time() - began) / REQUESTS * 1e6)
    return statistics.median(took)


async def added_us(number: int, ttft_s: float) -> float:
    """What admission adds with so many workers."""
    workers = Workers(number)
    admission = Admission(cast("Any", workers), None, SystemClock(), SloLimits(ttft_s=ttft_s))
    plain = WorkerRouter(Turns(workers.instances.values()), answer)
    followed = WorkerRouter(
        Turns(workers.instances.values()), answer, listener_factories=[admission.track_attempt]
    )
    without = await us_a_request(plain.send)
    return await us_a_request(chain([admission], followed.send)) - without


async def main() -> None:
    """Print the differences that it makes."""
    for number in (4, 64):
        for ttft_s in (inf, 2.0):
            took = await added_us(number, ttft_s)
            print(f"{number} workers, promise {ttft_s:g} s: {took:.1f} us a request")


if __name__ == "__main__":
    asyncio.run(main())
