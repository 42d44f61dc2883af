"""The fast replay of a trace."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from dynamo.core.errors import ConfigError, DynamoError, InstanceGone
from dynamo.core.values import KvEvent
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.operations.replay.cluster import uses_load_reports
from dynamo.operations.replay.fast.choosers import (
    BalancerChooser,
    Chooser,
    ChooserInputs,
    SolverChooser,
)
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.fleet import FastFleet, FleetRequests
from dynamo.operations.replay.fast.load_reports import LoadReports
from dynamo.operations.replay.fast.policy_chooser import PolicyChooser
from dynamo.operations.replay.fast.pulled_prompt import PulledPrompt
from dynamo.operations.replay.fast.request import FastRequest, WorkerListener
from dynamo.operations.replay.fast.run_cache import RunCache
from dynamo.operations.replay.fast.step_time import Leap, StepTime
from dynamo.operations.replay.fast.tier_units import TierUnits
from dynamo.operations.replay.fast.tiered_cache import TieredRunCache
from dynamo.operations.replay.fast.tiers import FastTiers
from dynamo.operations.replay.fast.worker import FastWorker
from dynamo.operations.replay.fleet import ReplayFleet
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog, ReplayProgressCallback
from dynamo.operations.replay.result import ReplayResult, TierResult
from dynamo.operations.replay.trace import TraceBlockConverter, TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup
from dynamo.runtime.calls.load_balancing import MODES, resolve_mode_alias
from dynamo.scheduling.router.factory import KV
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE


class LockstepRank(FastWorker):
    """A rank whose steps begin and end with those of all ranks of its worker, `peers`, itself among
    them. Each step takes the time of the slowest one. `idle`: the workers that may begin a step."""

    def __init__(self, peers: list[FastWorker], idle: list[FastWorker], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._peers, self._idle = peers, idle
        peers.append(self)

    def begin(self, now: float) -> None:
        peers = self._peers
        if any(peer.is_busy for peer in peers):
            return  # the next step begins when all have ended this one
        for peer in peers:
            FastWorker.begin(peer, now)
        busy = [peer for peer in peers if peer.is_busy]
        leaps = [peer.leap for peer in busy if peer.leap is not None]
        if not busy:
            return
        if len(leaps) == len(busy):
            steps = min(peer.leap_steps for peer in busy)
            leap = max(leaps, key=lambda leap: leap.duration_s(steps))
        else:
            steps, step_s = 1, max(peer.next_step_s for peer in busy)
            leap = Leap(step_s, 0.0, 0.0)
        for peer in busy:
            peer.align(leap, steps, now)

    def on_wake(self, now: float) -> None:
        super().on_wake(now)
        self._idle += [peer for peer in self._peers if peer.load and not peer.is_busy]

    def end_leap(self, now: float) -> None:
        for peer in self._peers:
            FastWorker.end_leap(peer, now)


PROGRESS_EVERY = 256
"""Completed requests between two reports of progress."""


class FastReplay(Replay, WorkerListener, FleetRequests):
    """A replay whose workers are state machines. Call `run` once."""

    def __init__(
        self,
        plan: ReplayPlan,
        progress: ReplayProgressCallback | None = None,
        drive: Callable[[ReplayFleet], None] | None = None,
    ) -> None:
        """Raise `ConfigError` for what only the exact replay simulates."""
        super().__init__(plan, progress, drive)
        mode = resolve_mode_alias(plan.router_settings.mode)
        if mode not in {KV, ADAPTIVE, *MODES}:
            what = f"router mode {mode}"
            raise ConfigError(f"the fast replay does not simulate {what}", hint="omit --fast")

    def run(self, conversations: Iterable[TraceConversation]) -> tuple[ReplayResult, ReplayLog]:
        """Replay `conversations`, which are ordered by start."""
        wall, cpu = time.perf_counter(), time.process_time()
        plan = self._plan
        size = plan.workers.block_tokens
        self._heap = EventHeap()
        self._remote_prefills = 0
        self._peers: list[FastWorker] = []
        self._shared_units: TierUnits | None = None
        self._size, self._block_bytes = size, size * plan.workers.kv_bytes_per_token
        self._run_tokens = max(plan.trace_block_tokens, size)
        self._unit = self._run_tokens // size
        blocks = TraceBlockConverter(plan.trace_block_tokens, size)
        self._log = ReplayLog(self._heap, blocks, size, plan.objectives)
        rng = Random(plan.seed)
        self.fleet: FastFleet
        self.fleet = fleet = FastFleet(plan, self._heap, self._log, self, rng)
        self._workers = fleet.machines
        self._chooser = fleet.chooser = chooser = self._make_chooser(rng)
        if uses_load_reports(plan.router_settings, plan.workers):
            publish = chooser.on_load_report
            fleet.report_loads(LoadReports(self._heap, plan.workers.transfer, publish))
        self._schedule_changes()
        self._conversations, self._open = iter(conversations), 1
        self._upcoming: TraceConversation
        self._start_next()
        gc.freeze()  # else each collection visits the whole trace
        try:
            self._heap.run()
        finally:
            gc.unfreeze()
        fleet.reject_held()
        self._duration_s = self._heap.time_s
        self._preemptions = sum(worker.preemptions for worker in self._workers.values())
        self._evictions = sum(worker.cache.evictions for worker in self._workers.values())
        arrived = sum(worker.blocks_arrived for worker in self._workers.values())
        self._kv_bytes_moved = arrived * self._block_bytes
        self._fallbacks = fleet.fallbacks
        self._tiers = {each.name: self._sum_units(at) for at, each in enumerate(plan.workers.tiers)}
        took = time.perf_counter() - wall, time.process_time() - cpu
        return self._make_result(self._log, *took), self._log

    def make_worker(self, name: str, number: int, group: ReplayGroup) -> FastWorker:
        info, plan = group.engine, self._plan.workers
        events = KvEventBuffer() if self._plan.router_settings.mode == KV else None
        has_tiers = plan.tiers and plan.prefix_caching
        cache = (TieredRunCache if has_tiers else RunCache)(
            info.num_blocks,
            self._unit,
            reuse_aware=plan.eviction == "reuse",
            enabled=plan.prefix_caching,
            events=events,
        )
        time = StepTime(group.timing, info.num_blocks * info.block_tokens)
        arguments = info, time, cache, self._log.inter_token, events, self._heap.wake, self
        if not plan.lockstep:
            worker = FastWorker(name, number, *arguments)
        else:
            if not number % plan.ranks:
                self._peers = []  # of the next worker
            worker = LockstepRank(self._peers, self._heap.idle, name, number, *arguments)
        worker.gap_target_s = self._plan.router_settings.disaggregation.itl_slo * 1e-3
        if isinstance(cache, TieredRunCache):
            units = self._open_tiers(publishes=events is not None)
            worker.tiers = FastTiers(units, cache, info, self._block_bytes, self._heap, worker)
            worker.ask_for_step = partial(self._heap.idle.append, worker)
        return worker

    def _open_tiers(self, *, publishes: bool) -> list[TierUnits]:
        """Return the tiers of an engine, of which one may be that of all."""
        tiers, opened = self._plan.workers.tiers, []
        for tier in tiers:
            shared = tier.name == "shared"
            units = self._shared_units if shared else None
            if units is None:
                exclusive = tier is tiers[0] and not shared
                units = TierUnits(tier, self._heap, exclusive=exclusive, publishes=publishes)
            if shared:
                self._shared_units = units
            opened.append(units)
        return opened

    def _sum_units(self, number: int) -> TierResult:
        workers = self._workers.values()
        tiers = [each.tiers.writers[number] for each in workers if each.tiers is not None]
        return self._sum_counters(self._log, [tier.counters for tier in tiers])

    def _make_chooser(self, rng: Random) -> Chooser:
        plan, settings = self._plan, self._plan.router_settings
        workers, fleet, size = plan.workers, self.fleet, self._size
        inputs = ChooserInputs(
            fleet.instances.copy(),
            settings,
            self._workers,
            self._heap,
            rng,
            self._send,
            self.reject,
            fleet.hold,
            plan.admission,
        )
        if settings.mode == KV:
            return SolverChooser(inputs, workers.transfer, self._run_tokens, size)
        plain = workers.ranks == 1 and workers.transfer is None and not plan.admission
        if plain and resolve_mode_alias(settings.mode) in MODES:
            return BalancerChooser(inputs)
        return PolicyChooser(inputs, size)

    def _start_next(self) -> None:
        """Put the next conversation of the trace on the heap."""
        conversation = next(self._conversations, None)
        if conversation is None:
            self._end_conversation()
        else:
            self._open += 1
            self._upcoming = conversation
            self._heap.call_at(conversation.start_s, self._start)

    def _start(self) -> None:
        conversation = self._upcoming
        self._start_next()
        self._arrive(iter(conversation.requests))

    def _arrive(self, turns: Iterator[TraceRequest]) -> None:
        """Send the next turn of a conversation after its delay."""
        turn = next(turns, None)
        if turn is None:
            self._end_conversation()
        elif turn.delay_s:
            when = self._heap.time_s + turn.delay_s
            self._heap.call_at(when, partial(self._send_turn, turn, turns))
        else:
            self._send_turn(turn, turns)

    def _end_conversation(self) -> None:
        """Stop after the last conversation, whatever scripts and planners would do later. The trace
        counts as one more."""
        self._open -= 1
        self._heap.stopped = not self._open

    def _send_turn(self, turn: TraceRequest, turns: Iterator[TraceRequest]) -> None:
        request = FastRequest(turn, self._size, self._unit, self._heap.time_s)
        request.turns = turns
        self._log.requests += 1
        self._log.arrived_tokens += turn.prompt_tokens
        self.fleet.choose(request)

    def _send(self, request: FastRequest, name: str) -> None:
        worker = self._workers[name]
        self._log.record_placement(request.row, worker.number)
        if self.fleet.reports is not None:
            self.fleet.report_request(name)
        worker.add(request, self._heap.time_s)
        if not worker.is_busy:
            self._heap.idle.append(worker)

    def reject(self, request: FastRequest, error: DynamoError) -> None:
        self._log.on_failed(error.code, request.arrived_s)
        self._report_progress(self._log)
        self._arrive(request.turns)

    def on_first_token(self, request: FastRequest) -> None:
        self._chooser.on_first_token(request)

    def on_finished(self, request: FastRequest) -> None:
        self._chooser.on_finished(request)
        self.end(request)

    def end(self, request: FastRequest) -> None:
        self._log.on_finished(request, request.end_s)
        if self.fleet.draining:
            self._heap.soon.append(self.fleet.check_draining)
        if not self._log.completed % PROGRESS_EVERY:
            self._report_progress(self._log)
        self._arrive(request.turns)

    def on_arrival(self, request: FastRequest, have_blocks: int) -> None:
        workers, now, source = self._plan.workers, self._heap.time_s, request.source
        worker, fleet = self._workers[source], self.fleet
        target = self._workers[request.worker]
        if worker.stopped:
            self._heap.soon.append(partial(self._compute_arriving, request, target))
            return
        prompt = FastRequest(request.trace_request, self._size, self._unit, now)
        prompt.length = request.length
        block_s = self._block_bytes / (workers.transfer or math.inf)
        times = block_s, self._heap, fleet.end_pulled
        pulled = PulledPrompt(request, target, prompt, worker, have_blocks, *times)
        prompt.sink = pulled.on_computed
        fleet.pulled[pulled] = None
        self._log.record_prefill(worker.number)
        self._remote_prefills += 1
        if fleet.reports is not None:
            fleet.report_request(source)
        worker.add(prompt, now)
        if not worker.is_busy:
            self._heap.idle.append(worker)

    def _compute_arriving(self, request: FastRequest, target: FastWorker) -> None:
        self.fleet.fallbacks[InstanceGone.code] += 1
        target.compute_arriving(request, self._heap.time_s)
        if not target.is_busy:
            self._heap.idle.append(target)

    def on_kv_events(self, worker: str, events: Sequence[KvEvent]) -> None:
        self._chooser.on_kv_events(worker, events)
