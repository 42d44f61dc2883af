"""The workers of an exact replay: engines that start and stop while the cluster runs."""

from __future__ import annotations

import asyncio
from random import Random

from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest
from dynamo.operations.replay.cluster import ReplayCluster
from dynamo.operations.replay.fleet import FleetDemand, FleetWorker, ReplayFleet, Startup
from dynamo.operations.replay.request_log import ReplayLog
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
