"""The faults of a chaos run: crashes, partitions and lost events."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
from tests.simulation.chaos.processes import SimulatedFrontend, SimulatedNetwork, SimulatedWorker

from dynamo.core.tasks import BackgroundTasks

RESTART_DELAY_S = (2.0, 15.0)
LEASE_END_DELAY_S = (0.0, 30.0)
"""Time for which a dead worker stays listed. The kernel may drop its lock at once; otherwise its
lease has to end."""
PARTITIONED_SHARE = (0.1, 0.5)
LEASE_LOSS_S = 20.0
"""A partition from discovery that lasts longer than this ends the lease."""


class FaultSchedule(msgspec.Struct, frozen=True):
    """Mean seconds between two faults of a kind; 0 means never. `crash_every_s` applies to each
    worker. `partition_s` is the shortest and longest duration of a partition, and of the time in
    which a frontend receives no events."""

    crash_every_s: float = 5 * 3600.0
    partition_every_s: float = 3600.0
    partition_s: tuple[float, float] = (10.0, 60.0)
    event_loss_every_s: float = 0.0


async def drop_events_repeatedly(
    network: SimulatedNetwork,
    faults: FaultSchedule,
    rng: Random,
    frontends: Sequence[SimulatedFrontend],
) -> None:
    """Repeatedly cut a frontend off from events for a while, in both directions. Its calls still
    work. Runs until cancelled."""
    clock = network.clock
    while True:
        await clock.sleep(rng.expovariate(1 / faults.event_loss_every_s))
        frontend = rng.choice(frontends)
        frontend.events.network.sever(breaks=True)
        try:
            await clock.sleep(rng.uniform(*faults.partition_s))
        finally:
            frontend.events.network.rejoin()


class SimulatedWorkers:
    """The workers of a run, which crash and restart."""

    def __init__(
        self, network: SimulatedNetwork, faults: FaultSchedule, rng: Random, num_workers: int
    ) -> None:
        self._network = network
        self._faults = faults
        self._rng = rng
        self._num_workers = num_workers
        self._fault_tasks = BackgroundTasks()
        self._dead_worker_tasks = BackgroundTasks()
        self._starts = 0
        self.prefill_workers = 0
        """Workers that only compute prompts for the others, which then decode."""
        self.workers: dict[int, SimulatedWorker] = {}
        self.crashes = self.partitions = self.partitioned_workers = 0

    async def start(self) -> None:
        """Start all workers, without faults."""
        for number in range(self._num_workers):
            await self._start_worker(number)

    def start_faults(self) -> None:
        """Start the crashes and partitions."""
        if self._faults.crash_every_s:
            for number in range(self._num_workers):
                self._fault_tasks.start(self._crash_repeatedly(number), f"crashes of {number}")
        if self._faults.partition_every_s:
            self._fault_tasks.start(self._partition_repeatedly(), "partitions")

    async def stop_faults(self) -> None:
        """Stop all faults, restart dead workers and end their leases."""
        await self._fault_tasks.close()
        for worker in self.workers.values():
            if worker.partitioned:
                worker.rejoin()
        await self._dead_worker_tasks.join()
        for number, worker in list(self.workers.items()):
            if not worker.alive:
                await self._start_worker(number)

    async def shutdown(self) -> None:
        """Stop all workers regularly."""
        for worker in self.workers.values():
            await worker.shutdown()

    async def _start_worker(self, number: int) -> None:
        """Start a worker. Workers with even numbers keep their name over a restart."""
        self._starts += 1
        name = f"w{number}" if number % 2 == 0 else f"w{number}-{self._starts}"
        role = "both"
        if self.prefill_workers:
            role = "prefill" if number < self.prefill_workers else "decode"
        worker = SimulatedWorker(self._network, name, role)
        await worker.start(self._starts)
        self.workers[number] = worker

    async def _crash_repeatedly(self, number: int) -> None:
        clock, rng = self._network.clock, self._rng
        while True:
            await clock.sleep(rng.expovariate(1 / self._faults.crash_every_s))
            await self._crash_worker(number)
            await self._start_worker(number)

    async def _crash_worker(self, number: int) -> None:
        """Crash a worker and return when it may restart. This task keeps no reference to the dead
        worker while it waits for the end of the lease."""
        clock, rng, worker = self._network.clock, self._rng, self.workers[number]
        self.crashes += 1
        self._dead_worker_tasks.start(
            self._kill_worker(worker, rng.uniform(*LEASE_END_DELAY_S)), f"lease of {worker.name}"
        )
        await clock.sleep(rng.uniform(*RESTART_DELAY_S))
        while worker.partitioned:
            await clock.sleep(1.0)

    async def _kill_worker(self, worker: SimulatedWorker, lease_s: float) -> None:
        await worker.crash()
        await self._network.clock.sleep(lease_s)
        await worker.end_lease()

    async def _partition_repeatedly(self) -> None:
        clock, rng = self._network.clock, self._rng
        while True:
            await clock.sleep(rng.expovariate(1 / self._faults.partition_every_s))
            await self._partition()

    async def _partition(self) -> None:
        clock, rng = self._network.clock, self._rng
        alive = [worker for worker in self.workers.values() if worker.alive]
        partitioned = rng.sample(alive, round(len(alive) * rng.uniform(*PARTITIONED_SHARE)))
        seconds, from_discovery = rng.uniform(*self._faults.partition_s), rng.random() < 0.5
        self.partitions += 1
        self.partitioned_workers += len(partitioned)
        for worker in partitioned:
            worker.partition()
        until = clock.now() + seconds
        if from_discovery and seconds > LEASE_LOSS_S:
            await clock.sleep(LEASE_LOSS_S)
            for worker in partitioned:
                worker.expire_lease()
        await clock.sleep_until(until)
        for worker in partitioned:
            worker.rejoin()
