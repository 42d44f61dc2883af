"""Simulated workers with admission before them, as a frontend has it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from dynamo.core.context import Context
from dynamo.core.errors import Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Send
from dynamo.core.settings.schema_router import Router as RouterSettings
from dynamo.core.tasks import Tasks
from dynamo.core.values import EngineInfo, GenerateRequest, Sampling, Stops
from dynamo.core.virtual_time import VirtualClock
from dynamo.inference.mock.timing import Linear
from dynamo.operations.replay.cluster import COMPONENT, NAMESPACE, Cluster, Workers
from dynamo.operations.replay.flight import FlightLog
from dynamo.operations.replay.trace import Blocks, Turn
from dynamo.runtime.instances import encode_instance, instance_key
from dynamo.scheduling.admission import Admission, Promise
from dynamo.scheduling.router.loads import LoadView
from dynamo.telemetry import Registry

BLOCK, PROMPT, ANSWER = 64, 256, 60
SLOTS = 16
HOLD_S = ANSWER * 0.023
CAPACITY = SLOTS / (HOLD_S + 0.05)


def small(number: int = 4, seqs: int = 4, blocks: int = 64) -> Workers:
    """Workers with few places: 23 ms a token whatever they do."""
    info = EngineInfo("mock", BLOCK, blocks, blocks * BLOCK, seqs, 8192)
    return Workers(number, info, Linear(23.0, 0.01), "reuse")


class Trial:
    """Sends requests; keeps what became of each, in order of arrival: seconds to the first token,
    or the error."""

    def __init__(
        self, send: Send, clock: VirtualClock, log: FlightLog, admission: Admission
    ) -> None:
        self.cluster: Any = None
        self.send, self.clock, self.log, self.admission = send, clock, log, admission
        self.first: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        self.refused: dict[int, tuple[float, Overloaded]] = {}
        self.rows = 0

    async def one(
        self,
        answer: int = ANSWER,
        *,
        bound: int | None = None,
        prompt: int = PROMPT,
        timeout_s: float | None = 300.0,
        priority: int = 0,
    ) -> None:
        """One request to its end."""
        row = self.rows
        self.rows += 1
        flight = self.log.depart(Turn(row, prompt, answer))
        request = GenerateRequest(
            str(row),
            "m",
            bytes(prompt * TOKEN_BYTES),
            Sampling(),
            Stops(max_tokens=bound or answer),
            priority=priority,
        )
        self.arrived[row] = arrived = self.clock.now()
        try:
            await self.send(request, Context(str(row), timeout_s=timeout_s), flight)
            self.first[row] = flight.first_s - arrived
        except Overloaded as error:
            self.refused[row] = (self.clock.now() - arrived, error)
        finally:
            self.log.landed(Turn(row, prompt, answer))

    async def offer(self, per_s: float, seconds: float, rng: Random, **about: Any) -> None:
        """An open loop."""
        end_s = self.clock.now() + seconds
        async with Tasks() as tasks:
            while True:
                await self.clock.sleep(rng.expovariate(per_s))
                if self.clock.now() >= end_s:
                    break
                lengths = about.get("lengths")
                answer = lengths(rng) if lengths else ANSWER
                tasks.start(self.one(answer, bound=about.get("bound", ANSWER)))
            await tasks.join()


class Admitted(Cluster):
    """With admission before its router."""

    async def hide(self) -> None:
        """Its first worker is not announced any more."""
        self._hidden = next(iter(self._client.instances.values()))
        await self._discovery.delete(instance_key(self._hidden))
        await asyncio.sleep(0)

    async def show(self) -> None:
        """It is again."""
        await self._discovery.put(instance_key(self._hidden), encode_instance(self._hidden))
        await asyncio.sleep(0)

    async def second(self, first: Trial, promise: Promise) -> Trial:
        """Another frontend; what workers report goes to both from now on."""
        send, admission = self.admit(promise)
        for number, engine in enumerate(self.engines):
            await self._report(engine, str(number))
        loads = LoadView(self._clock)
        loads.on_report(first.admission.reported)
        loads.on_report(admission.reported)
        await loads.follow(self._events, f"{NAMESPACE}.{COMPONENT}")
        other = Trial(send, self._clock, self._log, admission)
        other.rows = 1_000_000
        return other


@asynccontextmanager
async def trial(
    clock: VirtualClock,
    promise: Promise,
    workers: Workers,
    mode: str = "round_robin",
    metrics: Registry | None = None,
) -> Any:
    log = FlightLog(clock, Blocks(BLOCK, BLOCK), BLOCK)
    settings = RouterSettings(mode=mode)
    async with Admitted(workers, settings, log, clock, Random(1)) as cluster:
        if mode == "kv":
            clock.on_jump(cluster.catch_up)
        send, admission = cluster.admit(promise, metrics)
        made = Trial(send, clock, log, admission)
        made.cluster = cluster
        yield made
