"""The workers of a fast replay, and the requests that have none."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from functools import partial
from random import Random

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import DynamoError, NoWorkers, PoisonedRequest, WorkerFailed
from dynamo.operations.replay.fast.choosers import Chooser
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.load_reports import LoadReports
from dynamo.operations.replay.fast.pulled_prompt import PulledPrompt
from dynamo.operations.replay.fast.request import FastRequest
from dynamo.operations.replay.fast.worker import FastWorker
from dynamo.operations.replay.fleet import FleetDemand, FleetWorker, ReplayFleet
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.workers import ReplayGroup
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.migration import (
    INITIAL_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_WORKER_DEATHS,
    REPLACEMENT_TIMEOUT_S,
)
from dynamo.scheduling.router.features import decodes


class FleetRequests(ABC):
    """The requests of a replay, as its workers see them."""

    @abstractmethod
    def make_worker(self, name: str, number: int, group: ReplayGroup) -> FastWorker:
        """Return a rank of a worker of a group, with its number among all ranks."""

    @abstractmethod
    def reject(self, request: FastRequest, error: DynamoError) -> None:
        """End a request with an error."""

    @abstractmethod
    def end(self, request: FastRequest) -> None:
        """End a request that has all of its tokens."""


class FastFleet(ReplayFleet):
    """The workers of a fast replay, and the `machines` of their ranks by name. `chooser` is set
    before the start. Requests of a worker that dies move as `Migration` moves them. A request
    without any worker waits as long as it may, if one starts or if it had one."""

    chooser: Chooser

    def __init__(
        self,
        plan: ReplayPlan,
        heap: EventHeap,
        log: ReplayLog,
        requests: FleetRequests,
        rng: Random,
    ) -> None:
        super().__init__(plan.workers, heap, rng, plan.startup)
        self._plan, self._heap, self._log, self._requests = plan, heap, log, requests
        self.pulled: dict[PulledPrompt, None] = {}
        self.fallbacks = Counter[str]()
        self.reports: LoadReports | None = None
        self._held: dict[FastRequest, None] = {}
        rate, size = plan.workers.transfer, self.run_tokens * plan.workers.kv_bytes_per_token
        self._transfer = {} if rate is None else {"transfer": [{"slot_bytes": size}]}
        self.machines: dict[str, FastWorker] = {}
        for worker in self.workers:
            self._make_machines(worker)
        self.instances = {str(each.number): self._announce(each) for each in self.workers}
        self._can_answer = any(map(decodes, self.instances.values()))

    @property
    def run_tokens(self) -> int:
        """The tokens of a unit of the caches."""
        return max(self._plan.trace_block_tokens, self._plan.workers.block_tokens)

    def demand(self) -> FleetDemand:
        log, waiting = self._log, [*self._held, *self.chooser.waiting]
        serving = [each for each in self.workers if each.serves]
        machines = [machine for each in serving for machine in self._machines_of(each)]
        return FleetDemand(
            log.requests,
            log.arrived_tokens,
            log.completed,
            log.cached_tokens,
            log.output_tokens,
            sum(each.queued_tokens for each in machines) + sum(each.length for each in waiting),
            sum(each.decoding for each in machines),
            len(waiting),
        )

    def count_requests(self, worker: FleetWorker) -> int:
        machines = self._machines_of(worker)
        requests = sum(machine.load for machine in machines)
        return requests or sum(pulled.source in machines for pulled in self.pulled)

    def choose(self, request: FastRequest) -> None:
        """Let the router choose a worker for a request, now or when there is one."""
        if self._can_answer:
            self.chooser.choose(request)
        else:
            self.hold(request)

    def hold(self, request: FastRequest) -> None:
        """Keep a request until there is a worker, or reject it."""
        settings = self._plan.router_settings
        limit_s = settings.ttft_slo or settings.max_queue_wait
        if request.moves:
            limit_s = REPLACEMENT_TIMEOUT_S
        elif not self.is_starting:
            limit_s = 0.0
        self._held[request] = None
        if limit_s < math.inf:
            self._heap.call_at(self._heap.time_s + limit_s, partial(self._give_up, request))

    def reject_held(self) -> None:
        """Reject the requests for which no worker has come."""
        for request in [*self._held]:
            self._give_up(request)

    def end_pulled(self, pulled: PulledPrompt) -> None:
        """Take note that the blocks of a prompt have moved."""
        del self.pulled[pulled]
        if self.draining:
            self.check_draining()

    def report_loads(self, reports: LoadReports) -> None:
        """Report the loads of all workers from now on."""
        self.reports = reports
        for worker in self.workers:
            reports.start(str(worker.number), self._machines_of(worker))

    def report_request(self, name: str) -> None:
        """Take note that the rank of this name gets a request or a prompt for another worker."""
        number = int(name.partition("/")[0])
        if self.reports is not None:
            self.reports.on_request(str(number), self._machines_of(self.workers[number]))

    def _machines_of(self, worker: FleetWorker) -> list[FastWorker]:
        """Return the ranks of a worker; none before it serves."""
        names = self._plan.workers.names_of(worker.number)
        return [self.machines[name] for name in names if name in self.machines]

    def _make_machines(self, worker: FleetWorker) -> None:
        workers = self._plan.workers
        numbers = range(worker.number * workers.ranks, (worker.number + 1) * workers.ranks)
        for name, number in zip(workers.names_of(worker.number), numbers, strict=True):
            self.machines[name] = self._requests.make_worker(name, number, worker.group)

    def _announce(self, worker: FleetWorker) -> Instance:
        """Return the record of a worker whose blocks are runs, as the router sees them."""
        engine, size, number = worker.group.engine, self.run_tokens, worker.number
        blocks = max(1, engine.num_blocks * engine.block_tokens // size)
        engine = replace(engine, block_tokens=size, num_blocks=blocks)
        if (ranks := self._plan.workers.ranks) > 1:
            seqs, blocks = engine.max_num_seqs * ranks, blocks * ranks
            engine = replace(engine, max_num_seqs=seqs, num_blocks=blocks, data_parallel=ranks)
        return Instance(
            id=str(number),
            address=f"memory://{number}",
            namespace="replay",
            component="worker",
            endpoint="generate",
            capabilities={"engine": msgspec.to_builtins(engine), **self._transfer},
        )

    def _on_changed(self, worker: FleetWorker) -> None:
        name = str(worker.number)
        if worker.state == "ready":
            if not self._machines_of(worker):
                self._make_machines(worker)
                if self.reports is not None:
                    self.reports.start(name, self._machines_of(worker))
            self.instances[name] = self._announce(worker)
        else:
            for machine in self._machines_of(worker):
                machine.stopped = worker.state == "gone"
            if self.instances.pop(name, None) is None:
                return
        self._can_answer = any(map(decodes, self.instances.values()))
        self.chooser.update_instances(self.instances.copy())
        if self._can_answer:
            held, self._held = self._held, {}
            for request in held:
                self.choose(request)

    def _on_died(self, worker: FleetWorker) -> None:
        machines, now = self._machines_of(worker), self._heap.time_s
        stopped = [request for machine in machines for request in machine.stop(now)]
        for pulled in [*self.pulled]:
            if pulled.source in machines or pulled.target in machines:
                del self.pulled[pulled]
                pulled.close(now, target_died=pulled.target in machines)
                self.fallbacks[WorkerFailed.code] += pulled.source in machines
        for request in stopped:
            if request.sink is None:
                self._move(request)

    def _move(self, request: FastRequest) -> None:
        self.chooser.on_lost(request)
        request.worker = ""
        if request.recomputed >= request.output_tokens:
            request.end_s = request.last_token_s
            self._requests.end(request)
            return
        progress, request.awaited = not request.awaited, True
        request.deaths = 1 if progress else request.deaths + 1
        request.moves += 1
        request.excluded = frozenset()  # workers that were full when it was admitted
        self.moved += 1
        if request.deaths >= MAX_WORKER_DEATHS:
            error: DynamoError = PoisonedRequest("its workers have died one after the other")
        elif request.moves > self._plan.router_settings.migration_limit:
            error = WorkerFailed("its worker has died")
        else:
            longest_s = min(MAX_BACKOFF_S, INITIAL_BACKOFF_S * 2**request.deaths)
            pause_s = 0.0 if progress else longest_s * self._rng.random()
            self._heap.call_at(self._heap.time_s + pause_s, partial(self.choose, request))
            return
        self._requests.reject(request, error)

    def _give_up(self, request: FastRequest) -> None:
        if request in self._held:
            del self._held[request]
            failed = WorkerFailed if request.moves else NoWorkers
            self._requests.reject(request, failed("no worker has become ready in time"))
