"""Simulated workers behind admission, as in a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from dynamo.core.context import Context
from dynamo.core.errors import Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import SendRequest
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo, GenerateRequest, SamplingParams, StopConditions
from dynamo.core.virtual_time import VirtualClock
from dynamo.operations.replay.cluster import COMPONENT, NAMESPACE, ReplayCluster
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.trace import TraceBlockConverter, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.runtime.calls.instances import encode_instance, instance_key
from dynamo.scheduling.admission import Admission
from dynamo.scheduling.pipeline import chain, open_admission, open_router
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.telemetry import Registry

BLOCK, PROMPT, ANSWER = 64, 256, 60
SLOTS = 16
HOLD_S = ANSWER * 0.023
CAPACITY = SLOTS / (HOLD_S + 0.05)


def make_workers(number: int = 4, seqs: int = 4, blocks: int = 64) -> ReplayWorkers:
    """Return workers with few slots that take 23 ms a token under any load."""
    info = EngineInfo("mock", BLOCK, blocks, blocks * BLOCK, seqs, 8192)
    return ReplayWorkers([ReplayGroup(number, info, Timing(23.0, 0.01))], "reuse")


def make_workers_apart(prefill: int = 1, decode: int = 2) -> ReplayWorkers:
    """Return prefill workers that take 0.6 s for 6,000 tokens, and decode workers."""
    groups = []
    for count, role in ((prefill, "prefill"), (decode, "decode")):
        info = EngineInfo("mock", BLOCK, 4096, 4096 * BLOCK, 256, 8192, roles=(role,))
        groups.append(ReplayGroup(count, info, Timing(10.0, 0.1)))
    return ReplayWorkers(groups, "reuse", transfer=64e9)


class AdmissionTrial:
    """Send requests and record the result of each by its row: the seconds to the first token, or
    the seconds to the rejection with its error."""

    def __init__(
        self, send: SendRequest, clock: VirtualClock, log: ReplayLog, admission: Admission
    ) -> None:
        self.cluster: Any = None
        self.send, self.clock, self.log, self.admission = send, clock, log, admission
        self.first_token_s: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        self.rejected: dict[int, tuple[float, Overloaded]] = {}
        self.rows = 0

    async def send_request(
        self,
        answer: int = ANSWER,
        *,
        bound: int | None = None,
        prompt: int = PROMPT,
        timeout_s: float | None = 300.0,
        priority: int = 0,
        hashes: Sequence[int] = (),
    ) -> None:
        """Send a request and wait for its end. `hashes`: the prompt's first blocks in the trace."""
        row = self.rows
        self.rows += 1
        turn = TraceRequest(row, prompt, answer, tuple(hashes))
        replay_request = self.log.on_arrival(turn)
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
            await self.send(request, Context(str(row), timeout_s=timeout_s), replay_request)
            self.first_token_s[row] = replay_request.first_token_s - arrived
        except Overloaded as error:
            self.rejected[row] = (self.clock.now() - arrived, error)
        finally:
            self.log.on_ended(turn)

    async def offer_load(self, per_s: float, seconds: float, rng: Random, **options: Any) -> None:
        """Send requests in an open loop, with exponential gaps."""
        end_s = self.clock.now() + seconds
        async with BackgroundTasks() as tasks:
            while True:
                await self.clock.sleep(rng.expovariate(per_s))
                if self.clock.now() >= end_s:
                    break
                lengths = options.get("lengths")
                answer = lengths(rng) if lengths else ANSWER
                bound, prompt = options.get("bound", ANSWER), options.get("prompt", PROMPT)
                tasks.start(self.send_request(answer, bound=bound, prompt=prompt))
            await tasks.join()


class AdmissionCluster(ReplayCluster):
    """A cluster with admission before its router."""

    async def withdraw_worker(self) -> None:
        """Withdraw the announcement of the first worker."""
        self._withdrawn = next(iter(self.client.instances.values()))
        await self._discovery.delete(instance_key(self._withdrawn))
        await asyncio.sleep(0)

    async def announce_worker(self) -> None:
        """Announce the withdrawn worker again."""
        await self._discovery.put(instance_key(self._withdrawn), encode_instance(self._withdrawn))
        await asyncio.sleep(0)

    async def add_admission(
        self, limits: RouterSettings, metrics: Registry | None = None
    ) -> tuple[SendRequest, Admission]:
        """Return a `send` that passes requests through admission and router, and the admission."""
        self.settings, self.metrics = limits, metrics or Registry()
        await open_admission(self)
        await open_router(self)
        return chain([self.admission], self.router.send), self.admission

    async def add_frontend(self, first: AdmissionTrial, limits: RouterSettings) -> AdmissionTrial:
        """Add a second frontend; both receive the load reports after this call."""
        self.ledger = Ledger(self.clock, self.client, self.prefill_client)
        send, admission = await self.add_admission(limits)
        await self.publish_loads()
        loads = LoadView(self.clock)
        for each in (first.admission, admission):
            loads.add_listener(each._ledger.on_load_report)
            loads.add_listener(each.on_load_report)
        await loads.subscribe(self.events, f"{NAMESPACE}.{COMPONENT}")
        other = AdmissionTrial(send, self.clock, self._log, admission)
        other.rows = 1_000_000
        return other


@asynccontextmanager
async def open_trial(
    clock: VirtualClock,
    limits: RouterSettings,
    workers: ReplayWorkers,
    mode: str = "round_robin",
    metrics: Registry | None = None,
) -> Any:
    log = ReplayLog(clock, TraceBlockConverter(BLOCK, BLOCK), BLOCK)
    settings = RouterSettings(mode=mode, disaggregation=limits.disaggregation)
    async with AdmissionCluster(workers, settings, log, clock, Random(1)) as cluster:
        if mode == "kv":
            clock.on_time_advanced(cluster.deliver_computed_tokens)
        send, admission = await cluster.add_admission(limits, metrics)
        trial = AdmissionTrial(send, clock, log, admission)
        trial.cluster = cluster
        yield trial
