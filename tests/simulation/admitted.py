"""Simulated workers with admission before them, as a frontend has it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from dynamo.core.context import Context
from dynamo.core.errors import Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import SendRequest
from dynamo.core.settings.schema_router import RouterSettings as RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo, GenerateRequest, SamplingParams, StopConditions
from dynamo.core.virtual_time import VirtualClock
from dynamo.inference.mock.timing import LinearTiming
from dynamo.operations.replay.cluster import COMPONENT, NAMESPACE, ReplayCluster, ReplayWorkers
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.trace import TraceBlockConverter, TraceRequest
from dynamo.runtime.calls.instances import encode_instance, instance_key
from dynamo.scheduling.admission import Admission, SloLimits
from dynamo.scheduling.router.load_view import LoadView
from dynamo.telemetry import Registry

BLOCK, PROMPT, ANSWER = 64, 256, 60
SLOTS = 16
HOLD_S = ANSWER * 0.023
CAPACITY = SLOTS / (HOLD_S + 0.05)


def small(number: int = 4, seqs: int = 4, blocks: int = 64) -> ReplayWorkers:
    """Workers with few places: 23 ms a token whatever they do."""
    info = EngineInfo("mock", BLOCK, blocks, blocks * BLOCK, seqs, 8192)
    return ReplayWorkers(number, info, LinearTiming(23.0, 0.01), "reuse")


class Trial:
    """Sends requests; keeps what became of each, in order of arrival: seconds to the first token,
    or the error."""

    def __init__(
        self, send: SendRequest, clock: VirtualClock, log: ReplayLog, admission: Admission
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
        flight = self.log.on_arrival(TraceRequest(row, prompt, answer))
        request = GenerateRequest(
            str(row),
            "m",
            bytes(prompt * TOKEN_BYTES),
            SamplingParams(),
            StopConditions(max_tokens=bound or answer),
            priority=priority,
        )
        self.arrived[row] = arrived = self.clock.now()
        try:
            await self.send(request, Context(str(row), timeout_s=timeout_s), flight)
            self.first[row] = flight.first_token_s - arrived
        except Overloaded as error:
            self.refused[row] = (self.clock.now() - arrived, error)
        finally:
            self.log.on_ended(TraceRequest(row, prompt, answer))

    async def offer(self, per_s: float, seconds: float, rng: Random, **about: Any) -> None:
        """An open loop."""
        end_s = self.clock.now() + seconds
        async with BackgroundTasks() as tasks:
            while True:
                await self.clock.sleep(rng.expovariate(per_s))
                if self.clock.now() >= end_s:
                    break
                lengths = about.get("lengths")
                answer = lengths(rng) if lengths else ANSWER
                tasks.start(self.one(answer, bound=about.get("bound", ANSWER)))
            await tasks.join()


class Admitted(ReplayCluster):
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

    async def second(self, first: Trial, promise: SloLimits) -> Trial:
        """Another frontend; what workers report goes to both from now on."""
        send, admission = self.add_admission(promise)
        for number, engine in enumerate(self.engines):
            await self._publish_load(engine, str(number))
        loads = LoadView(self._clock)
        loads.add_listener(first.admission.on_load_report)
        loads.add_listener(admission.on_load_report)
        await loads.subscribe(self._events, f"{NAMESPACE}.{COMPONENT}")
        other = Trial(send, self._clock, self._log, admission)
        other.rows = 1_000_000
        return other


@asynccontextmanager
async def trial(
    clock: VirtualClock,
    promise: SloLimits,
    workers: ReplayWorkers,
    mode: str = "round_robin",
    metrics: Registry | None = None,
) -> Any:
    log = ReplayLog(clock, TraceBlockConverter(BLOCK, BLOCK), BLOCK)
    settings = RouterSettings(mode=mode)
    async with Admitted(workers, settings, log, clock, Random(1)) as cluster:
        if mode == "kv":
            clock.on_time_advanced(cluster.deliver_computed_tokens)
        send, admission = cluster.add_admission(promise, metrics)
        made = Trial(send, clock, log, admission)
        made.cluster = cluster
        yield made
