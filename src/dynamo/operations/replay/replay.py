"""Replay of a trace on a simulated cluster."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, DynamoError, NoWorkers, Overloaded, WorkerFailed
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Reply, SendRequest
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.core.virtual_time import Deadlock, VirtualClock, run_in_virtual_time
from dynamo.inference.tiers.tier import TierCounters
from dynamo.operations.bench.workload import LatencyObjectives
from dynamo.operations.latency_summary import summarize_latencies
from dynamo.operations.replay.cluster import ReplayCluster
from dynamo.operations.replay.events import FleetEvent, schedule_events
from dynamo.operations.replay.fleet import FleetDemand, FleetWorker, ReplayFleet, Startup
from dynamo.operations.replay.request_log import ReplayLog, ReplayProgressCallback
from dynamo.operations.replay.result import PrefillCounts, ReplayResult, TierResult
from dynamo.operations.replay.trace import TraceBlockConverter, TraceConversation
from dynamo.operations.replay.workers import ReplayWorkers
from dynamo.scheduling.workers.placed_request import PlacedRequest


class ClusterFleet(ReplayFleet):
    """The workers of a `cluster`. Changes follow each other in one task of `tasks`."""

    def __init__(
        self,
        cluster: ReplayCluster,
        workers: ReplayWorkers,
        log: ReplayLog,
        rng: Random,
        startup: Startup,
        tasks: BackgroundTasks,
    ) -> None:
        super().__init__(workers, cluster.clock, rng, startup)
        self._cluster, self._log, self._tasks = cluster, log, tasks
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        if cluster.migrates:
            cluster.ledger.on_ended.append(self._on_ended)

    def demand(self) -> FleetDemand:
        log, waiting = self._log, self._cluster.waiting
        numbers = [worker.number for worker in self.workers if worker.serves]
        workers = [self._cluster.worker(number) for number in numbers]
        loads = [worker.engine.report_load() for worker in workers if worker is not None]
        running = sum(load.running - load.arriving for load in loads)
        return FleetDemand(
            log.requests,
            log.arrived_tokens,
            log.completed,
            log.cached_tokens,
            log.output_tokens,
            sum(load.prefill_tokens for load in loads),
            running,
            waiting,
        )

    def count_requests(self, worker: FleetWorker) -> int:
        return self._cluster.ledger.workers.count(str(worker.number))

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Send a request. Without any worker it waits if one starts. Raises `NoWorkers`."""
        while True:
            self._changed.clear()
            try:
                return await self._cluster.send(request, context, reply)
            except NoWorkers:
                if not self.is_starting:
                    raise
            await self._changed.wait()

    def _on_ended(self, placed: PlacedRequest, error: BaseException | None) -> None:
        del placed
        self.moved += isinstance(error, WorkerFailed)
        if self.draining:
            asyncio.get_running_loop().call_soon(self.check_draining)

    def _on_changed(self, worker: FleetWorker) -> None:
        self._tasks.start(self._change(worker), "change of a worker")

    def _on_died(self, worker: FleetWorker) -> None:
        """Do nothing more: a worker that is gone is stopped with its requests."""

    async def _change(self, worker: FleetWorker) -> None:
        async with self._turn:
            started = self._cluster.worker(worker.number)
            if worker.state == "ready" and started is None:
                await self._cluster.start_worker(worker.number, worker.group)
            elif worker.state == "ready" and started is not None:
                await self._cluster.announce(started, worker.group)
            elif started is not None:
                await self._cluster.withdraw(started)
        self._changed.set()
        if worker.state == "gone" and started is not None:
            async with self._turn:  # after others that leave now
                self._cluster.deliver_computed_tokens()
                await started.stop()


SAMPLING = SamplingParams()
SECONDS_PER_HOUR = 3600.0
SIMULTANEOUS_S = 1e-9
"""Arrivals this close to each other happen at the same instant of virtual time."""
DEADLOCK_AFTER_S = 3600.0
STOPS = StopConditions()
"""Stop conditions of every request. Policies must not see how long an answer will be."""


class ReplayPlan(msgspec.Struct, frozen=True):
    """Everything that determines a replay but the conversations. Without `admission` no request is
    queued for a slot or rejected. `objectives` decide which requests are good. `settings` is copied
    into the result. `events` change the workers, which take the time of `startup` to start. Each
    has `worker_gpus` (0: one for each rank)."""

    trace: str
    workers: ReplayWorkers
    router_settings: RouterSettings
    trace_block_tokens: int = 512
    seed: int = 0
    admission: bool = False
    objectives: LatencyObjectives = LatencyObjectives()
    settings: Mapping[str, object] = {}
    startup: Startup = Startup()
    events: Sequence[FleetEvent] = ()
    worker_gpus: float = 0.0


class Replay:
    """A replay. Call `run` once. `fleet` has its workers from then on."""

    fleet: ReplayFleet
    _send_request: SendRequest

    def __init__(
        self,
        plan: ReplayPlan,
        progress: ReplayProgressCallback | None = None,
        drive: Callable[[ReplayFleet], None] | None = None,
    ) -> None:
        """`drive` gets the workers before the first request, to observe and change them later."""
        self._plan = plan
        self._report_progress = progress or (lambda _: None)
        self._drive = drive

    def _schedule_changes(self) -> None:
        schedule_events(self.fleet, self._plan.events)
        if self._drive is not None:
            self._drive(self.fleet)

    def run(self, conversations: Iterable[TraceConversation]) -> tuple[ReplayResult, ReplayLog]:
        """Replay `conversations`, which are ordered by start. Raises `Deadlock`, and `ConfigError`
        for ranks in lockstep."""
        if self._plan.workers.lockstep:
            raise ConfigError("only the fast replay has ranks in lockstep", hint="add --fast")
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            log = run_in_virtual_time(lambda clock: self._replay(clock, conversations))
        finally:
            gc.unfreeze()
        took = (time.perf_counter() - wall, time.process_time() - cpu)
        return self._make_result(log, *took), log

    async def _replay(
        self, clock: VirtualClock, conversations: Iterable[TraceConversation]
    ) -> ReplayLog:
        plan = self._plan
        block_tokens = plan.workers.block_tokens
        blocks = TraceBlockConverter(plan.trace_block_tokens, block_tokens)
        spreads = bool(plan.workers.tiers)
        log = ReplayLog(clock, blocks, block_tokens, plan.objectives, spreads=spreads)
        rng = Random(plan.seed)
        async with (
            BackgroundTasks() as changes,
            ReplayCluster(
                plan.workers,
                plan.router_settings,
                log,
                clock,
                rng,
                admission=plan.admission,
                migrates=bool(plan.events or self._drive),
            ) as cluster,
            BackgroundTasks() as tasks,
        ):
            self.fleet = fleet = ClusterFleet(
                cluster, plan.workers, log, rng, plan.startup, changes
            )
            self._send_request = fleet.send if cluster.migrates else cluster.send
            self._schedule_changes()
            clock.on_time_advanced(lambda: self._on_clock_jump(cluster, log))
            gc.freeze()  # else each collection visits the whole trace
            for conversation in conversations:
                if conversation.start_s > clock.now() + SIMULTANEOUS_S:
                    await clock.sleep_until(conversation.start_s)
                tasks.start(self._run_conversation(conversation, log, clock))
                self._report_progress(log)
            await tasks.join()
            log.flush_token_times()
            self._duration_s = clock.now()
            self._preemptions = sum(engine.scheduler.preemptions for engine in cluster.engines)
            self._evictions = sum(engine.scheduler.pool.evictions for engine in cluster.engines)
            self._count_arrivals(cluster, log)
        return log

    def _sum_tier(self, number: int, cluster: ReplayCluster, log: ReplayLog) -> TierResult:
        """Sum up what the tier of that number did for all engines."""
        tiers = [engine.tiers for engine in cluster.engines]
        return self._sum_counters(log, [tier.tiers[number].counters for tier in tiers])

    def _sum_counters(self, log: ReplayLog, counters: Sequence[TierCounters]) -> TierResult:
        loaded = sum(counts.loaded_blocks for counts in counters)
        return TierResult(
            loaded,
            sum(counts.stored_blocks for counts in counters),
            sum(counts.evicted_blocks for counts in counters),
            loaded * self._plan.workers.block_tokens / max(1, log.prompt_tokens),
            sum(counts.load_s for counts in counters),
        )

    def _count_arrivals(self, cluster: ReplayCluster, log: ReplayLog) -> None:
        """Count the prompts that came from prefill workers, and the blocks of tiers."""
        arrivals = [engine.arrivals.counters for engine in cluster.engines]
        self._fallbacks = sum((counters.fallbacks for counters in arrivals), Counter[str]())
        prompts = sum(counters.prompts for counters in arrivals)
        self._remote_prefills = prompts - self._fallbacks.total()
        blocks = sum(counters.blocks_arrived for counters in arrivals)
        workers = self._plan.workers
        self._kv_bytes_moved = blocks * workers.block_tokens * workers.kv_bytes_per_token
        self._tiers: dict[str, TierResult] = {
            tier.name: self._sum_tier(number, cluster, log)
            for number, tier in enumerate(workers.tiers)
        }

    async def _run_conversation(
        self,
        conversation: TraceConversation,
        log: ReplayLog,
        clock: VirtualClock,
    ) -> None:
        for turn in conversation.requests:
            if turn.delay_s:
                await clock.sleep(turn.delay_s)
            reply = log.on_arrival(turn)
            request_id = str(turn.row)
            token_ids = bytes(turn.prompt_tokens * TOKEN_BYTES)
            request = GenerateRequest(request_id, self._plan.trace, token_ids, SAMPLING, STOPS)
            error = ""
            try:
                await self._send_request(request, Context(request_id), reply)
            except DynamoError as failure:
                error = failure.code
            log.on_ended(turn, error)
            self._report_progress(log)

    def _on_clock_jump(self, cluster: ReplayCluster, log: ReplayLog) -> None:
        if cluster.waiting:  # the router may place them at this instant
            cluster.deliver_computed_tokens()
        if log.in_flight and log.clock.now() > log.last_progress_s + DEADLOCK_AFTER_S:
            raise Deadlock(
                f"{len(log.in_flight)} requests are in flight without progress since "
                f"{log.last_progress_s:.0f} s of virtual time"
            )

    def _make_result(self, log: ReplayLog, wall_s: float, cpu_s: float) -> ReplayResult:
        plan, fleet = self._plan, self.fleet
        engines = len(fleet.workers) * plan.workers.ranks
        gpus = plan.worker_gpus or plan.workers.ranks
        promised = plan.objectives.any_set
        counts = log.count_requests()
        return ReplayResult(
            trace=plan.trace,
            settings=plan.settings,
            requests=log.requests,
            completed=log.completed,
            rejected=log.errors.get(Overloaded.code, 0),
            reuse_first_admission=log.cached_tokens / max(1, log.prompt_tokens),
            ttft_ms=summarize_latencies(log.ttft_s),
            tpot_ms=summarize_latencies(log.tpot_s),
            itl_ms=log.inter_token.summarize(),
            e2e_ms=summarize_latencies(log.e2e_s),
            output_tokens_per_s=log.output_tokens / max(1e-9, self._duration_s),
            duration_s=self._duration_s,
            preemptions=self._preemptions,
            evictions=self._evictions,
            requests_per_worker=[counts[engine] for engine in range(engines)],
            prefills=PrefillCounts(log.completed - self._remote_prefills, self._remote_prefills),
            prefill_fallbacks=dict(self._fallbacks),
            kv_bytes_moved=self._kv_bytes_moved,
            tiers=self._tiers,
            errors=log.errors,
            wall_s=round(wall_s, 3),
            cpu_s=round(cpu_s, 3),
            good_share=log.good / max(1, log.requests) if promised else None,
            broken_promises=log.requests - log.good if promised else None,
            gpu_hours=gpus * sum(fleet.lifetimes_s(self._duration_s)) / SECONDS_PER_HOUR,
            moved_requests=fleet.moved,
            timeline=fleet.timeline if fleet.has_changed else (),
        )
