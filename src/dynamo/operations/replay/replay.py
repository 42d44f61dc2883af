"""Runs a trace on a simulated cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from random import Random

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.settings.schema_router import Router as RouterSettings
from dynamo.core.tasks import Tasks
from dynamo.core.values import GenerateRequest, Sampling, Stops
from dynamo.core.virtual_time import Deadlock, VirtualClock, run_virtually
from dynamo.operations.replay.cluster import Cluster, Workers
from dynamo.operations.replay.figures import Result, spread
from dynamo.operations.replay.flight import FlightLog, Progress
from dynamo.operations.replay.trace import Blocks, Conversation
from dynamo.scheduling.admission import Promise
from dynamo.scheduling.router.opening import KV

SAMPLING = Sampling()
INSTANT_S = 1e-9
"""Timers so close to each other fire together: who arrives then arrives at one instant."""
STUCK_S = 3600.0
STOPS = Stops()
"""The same for all: no policy may see how long an answer will be."""


class Plan(msgspec.Struct, frozen=True):
    """What is replayed on what. `promise`: what admission goes by (None: there is none); `about`:
    the settings, for the result."""

    trace: str
    workers: Workers
    routing: RouterSettings
    trace_block_tokens: int = 512
    seed: int = 0
    promise: Promise | None = None
    about: Mapping[str, object] = {}


class Replay:
    """One replay; `run` it once."""

    def __init__(self, plan: Plan, progress: Progress | None = None) -> None:
        self._plan = plan
        self._progress = progress

    def run(self, conversations: Iterable[Conversation]) -> tuple[Result, FlightLog]:
        """Replay `conversations`, which come in order of their start. Raises `Deadlock`."""
        wall, cpu = time.perf_counter(), time.process_time()
        log = run_virtually(lambda clock: self._replay(clock, conversations))
        took = (time.perf_counter() - wall, time.process_time() - cpu)
        return self._result(log, *took), log

    async def _replay(
        self, clock: VirtualClock, conversations: Iterable[Conversation]
    ) -> FlightLog:
        plan = self._plan
        block_tokens = plan.workers.engine.block_tokens
        log = FlightLog(clock, Blocks(plan.trace_block_tokens, block_tokens), block_tokens)
        rng = Random(plan.seed)
        async with (
            Cluster(plan.workers, plan.routing, log, clock, rng, plan.promise) as cluster,
            Tasks() as tasks,
        ):
            clock.on_jump(lambda: self._jumped(cluster, log))
            for conversation in conversations:
                if conversation.start_s > clock.now() + INSTANT_S:
                    await clock.sleep_until(conversation.start_s)
                tasks.start(self._converse(conversation, cluster, log, clock))
                self._tell(log)
            await tasks.join()
            log.close()
            self._duration_s = clock.now()
            self._preemptions = sum(one.scheduler.preemptions for one in cluster.engines)
            self._evictions = sum(one.scheduler.pool.evictions for one in cluster.engines)
        return log

    async def _converse(
        self, conversation: Conversation, cluster: Cluster, log: FlightLog, clock: VirtualClock
    ) -> None:
        for turn in conversation.turns:
            if turn.delay_s:
                await clock.sleep(turn.delay_s)
            flight = log.depart(turn)
            name = str(turn.row)
            ids = bytes(turn.prompt_tokens * TOKEN_BYTES)
            request = GenerateRequest(name, self._plan.trace, ids, SAMPLING, STOPS)
            error = ""
            try:
                await cluster.send(request, Context(name), flight)
            except DynamoError as failure:
                error = failure.code
            log.landed(turn, error)
            self._tell(log)

    def _jumped(self, cluster: Cluster, log: FlightLog) -> None:
        if self._plan.routing.mode == KV:
            cluster.catch_up()
        if log.under_way and log.clock.now() > log.moved_s + STUCK_S:
            raise Deadlock(
                f"{len(log.under_way)} requests wait and nothing has moved since "
                f"{log.moved_s:.0f} s of virtual time"
            )

    def _tell(self, log: FlightLog) -> None:
        if self._progress is not None:
            self._progress(log)

    def _result(self, log: FlightLog, wall_s: float, cpu_s: float) -> Result:
        plan = self._plan
        engines = plan.workers.number * plan.workers.ranks
        return Result(
            trace=plan.trace,
            settings=plan.about,
            requests=log.requests,
            completed=log.completed,
            rejected=log.errors.get(Overloaded.code, 0),
            reuse_first_admission=log.cached_tokens / max(1, log.prompt_tokens),
            ttft_ms=spread(log.ttft_s),
            tpot_ms=spread(log.tpot_s),
            itl_ms=log.gaps.spread(),
            e2e_ms=spread(log.e2e_s),
            output_tokens_per_s=log.output_tokens / max(1e-9, self._duration_s),
            duration_s=self._duration_s,
            preemptions=self._preemptions,
            evictions=self._evictions,
            requests_per_worker=[log.requests_of(engine) for engine in range(engines)],
            errors=log.errors,
            wall_s=round(wall_s, 3),
            cpu_s=round(cpu_s, 3),
        )
