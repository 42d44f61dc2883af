"""What befalls the workers of a day."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from dynamo.core.tasks import Tasks
from dynamo.testing.day.processes import Ground, SimulatedFrontend, SimulatedWorker

RESTART_S = (2.0, 15.0)
LEASE_S = (0.0, 30.0)
"""A dead worker stays listed so long: not at all where the kernel drops its lock, else until its
lease ends."""
SHARE = (0.1, 0.5)
LOST_LEASE_S = 20.0
"""Whom discovery, too, has not heard of for so long is taken off its list."""


class Faults(msgspec.Struct, frozen=True):
    """Seconds between two crashes of a worker, and between two partitions, on average; 0: never.
    `partition_s`: the shortest and longest partition; `deaf_every_s`: a frontend hears no events
    for as long as that."""

    crash_every_s: float = 5 * 3600.0
    partition_every_s: float = 3600.0
    partition_s: tuple[float, float] = (10.0, 60.0)
    deaf_every_s: float = 0.0


async def deafen(
    ground: Ground, faults: Faults, rng: Random, frontends: Sequence[SimulatedFrontend]
) -> None:
    """Without end: one of them hears nothing for a while."""
    clock = ground.clock
    while True:
        await clock.sleep(rng.expovariate(1 / faults.deaf_every_s))
        frontend = rng.choice(frontends)
        frontend.deafen()
        try:
            await clock.sleep(rng.uniform(*faults.partition_s))
        finally:
            frontend.hear_again()


class Fleet:
    """The workers, who die and come back."""

    def __init__(self, ground: Ground, faults: Faults, rng: Random, number: int) -> None:
        self._ground = ground
        self._faults = faults
        self._rng = rng
        self._number = number
        self._living = Tasks()
        self._graves = Tasks()
        self._starts = 0
        self.workers: dict[int, SimulatedWorker] = {}
        self.crashes = self.partitions = self.severed = 0

    async def start(self) -> None:
        """All serve; nothing befalls them yet."""
        for number in range(self._number):
            await self._come(number)

    def unleash(self) -> None:
        """From now on they crash, and the network breaks."""
        if self._faults.crash_every_s:
            for number in range(self._number):
                self._living.start(self._live(number), f"life of worker {number}")
        if self._faults.partition_every_s:
            self._living.start(self._partitions(), "partitions")

    async def calm(self) -> None:
        """No more faults: everybody is back, whom nobody hears of any more is buried."""
        await self._living.close()
        for worker in self.workers.values():
            if worker.severed:
                worker.rejoin()
        await self._graves.join()
        for number, worker in list(self.workers.items()):
            if not worker.alive:
                await self._come(number)

    async def leave(self) -> None:
        """Stop in good order."""
        for worker in self.workers.values():
            await worker.leave()

    async def _come(self, number: int) -> None:
        """Those with even numbers keep their name over a restart, the others get a new one."""
        self._starts += 1
        name = f"w{number}" if number % 2 == 0 else f"w{number}-{self._starts}"
        self.workers[number] = await SimulatedWorker.start(self._ground, name, self._starts)

    async def _live(self, number: int) -> None:
        clock, rng = self._ground.clock, self._rng
        while True:
            await clock.sleep(rng.expovariate(1 / self._faults.crash_every_s))
            await self._fall(number)
            await self._come(number)

    async def _fall(self, number: int) -> None:
        """It crashes; until it may come back. Who fell is not held beyond that."""
        clock, rng, worker = self._ground.clock, self._rng, self.workers[number]
        self.crashes += 1
        self._graves.start(self._die(worker, rng.uniform(*LEASE_S)), f"death of {worker.name}")
        await clock.sleep(rng.uniform(*RESTART_S))
        while worker.severed:
            await clock.sleep(1.0)

    async def _die(self, worker: SimulatedWorker, lease_s: float) -> None:
        await worker.crash()
        await self._ground.clock.sleep(lease_s)
        await worker.bury()

    async def _partitions(self) -> None:
        clock, rng = self._ground.clock, self._rng
        while True:
            await clock.sleep(rng.expovariate(1 / self._faults.partition_every_s))
            await self._partition()

    async def _partition(self) -> None:
        clock, rng = self._ground.clock, self._rng
        alive = [worker for worker in self.workers.values() if worker.alive]
        part = rng.sample(alive, round(len(alive) * rng.uniform(*SHARE)))
        seconds, from_discovery = rng.uniform(*self._faults.partition_s), rng.random() < 0.5
        self.partitions += 1
        self.severed += len(part)
        for worker in part:
            worker.sever()
        until = clock.now() + seconds
        if from_discovery and seconds > LOST_LEASE_S:
            await clock.sleep(LOST_LEASE_S)
            for worker in part:
                worker.expire()
        await clock.sleep_until(until)
        for worker in part:
            worker.rejoin()
