"""The processes of the day: each has planes of its own, and is as alone as a real one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random
from typing import cast

import msgspec
from msgspec.structs import replace

from dynamo.communication.discovery.memory import MemoryDiscovery
from dynamo.communication.events.memory import MemoryEvents
from dynamo.communication.requests.memory import MemoryRequests
from dynamo.core.settings import Settings
from dynamo.core.values import EngineInfo
from dynamo.core.virtual_time import VirtualClock
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.leap import Leaper
from dynamo.inference.mock.simulated import make_simulated
from dynamo.inference.mock.timing import Timing
from dynamo.inference.worker import Worker
from dynamo.models.card import ModelCard
from dynamo.models.files import FileRef
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.leases import KeptDiscovery
from dynamo.runtime.watch import Watch
from dynamo.scheduling.router.kv import KvPolicy
from dynamo.services.routing import ModelRouting, Routing
from dynamo.services.way import Way

MODEL = "day"
VOCABULARY = 1 << 16
WORDS = range(1_000, VOCABULARY)
"""What engines say; none of it ends an answer."""


class Ground(msgspec.Struct, frozen=True):
    """What all processes of a day stand on. `place`: the name of their memory planes; `leaping`:
    engines in the midst of many steps."""

    place: str
    clock: VirtualClock
    engine: EngineInfo
    timing: Timing
    mode: str
    leaping: set[Leaper]

    @property
    def card(self) -> ModelCard:
        """The model that is served. Nobody asks for its files."""
        files = FileRef("tokenizer.json", "0" * 64, 0, "/nowhere")
        engine = self.engine
        return ModelCard(
            (MODEL,), engine.context_tokens, VOCABULARY, files, engine.block_tokens, engine=engine
        )

    async def runtime(self, role: str, name: str, seed: int) -> tuple[DistributedRuntime, Lease]:
        """A process's runtime, and its lease."""
        settings = Settings()
        planes = {"discovery": self.place, "requests": "memory:", "events": self.place}
        settings = replace(
            settings,
            runtime=replace(settings.runtime, **planes),
            router=replace(settings.router, mode=self.mode),
        )
        made = await DistributedRuntime.create(settings, role=role, name=name, clock=self.clock)
        made.instance_id = name
        made.rng = Random(seed)
        lease = MemoryDiscovery(self.place.partition(":")[2])
        made.discovery = KeptDiscovery(lease)
        return made, lease


Lease = MemoryDiscovery


class SimulatedWorker:
    """One worker's process, from start to its end. Make it by `start`."""

    def __init__(
        self,
        name: str,
        runtime: DistributedRuntime,
        lease: Lease,
        worker: Worker,
        engine: BatchedEngine,
        leaper: Leaper,
    ) -> None:
        self.name = name
        self.engine = engine
        self.leaper = leaper
        self.alive = True
        self._runtime = runtime
        self._requests = cast("MemoryRequests", runtime.requests)
        self._events = cast("MemoryEvents", runtime.events)
        self._lease = lease
        self._worker = worker
        self._expired = False

    @classmethod
    async def start(cls, ground: Ground, name: str, seed: int) -> SimulatedWorker:
        """Ready and announced."""
        engine, leaper = make_simulated(
            ground.engine,
            ground.timing,
            ground.clock,
            settled=ground.clock.settled,
            eviction="reuse",
            words=WORDS,
            leaping=ground.leaping,
        )
        runtime, lease = await ground.runtime("worker", name, seed)
        worker = Worker(engine, ground.card)
        await worker.attach(runtime)
        return cls(name, runtime, lease, worker, engine, leaper)

    @property
    def severed(self) -> bool:
        """Whether the network reaches it not."""
        return self._requests.severed

    def sever(self) -> None:
        """The network reaches it no more."""
        self.leaper.catch_up()
        self._requests.sever()
        self._events.sever()

    def expire(self) -> None:
        """Its lease has ended."""
        if self.severed and self.alive and not self._expired:
            self._expired = True
            self._lease.expire()

    def rejoin(self) -> None:
        """The network reaches it again, or what is left of it."""
        self._requests.rejoin()
        if not self.alive:
            return
        self._events.rejoin()
        if self._expired:
            self._expired = False
            self._lease.lose_lease()

    async def crash(self) -> None:
        """As kill -9 does: it says nothing more, its connections break; discovery and the event
        plane do not know yet."""
        self.leaper.catch_up()
        self.alive = False
        self._events.sever()
        self._requests.abort()
        await self.engine.stop()

    async def bury(self) -> None:
        """Its lease ends."""
        await self._worker.close()
        await self.leave()

    async def leave(self) -> None:
        """Stop in good order."""
        if self.alive:
            await self._worker.close()
        await self._runtime.shutdown(0.0)
        await self._runtime.discovery.close()


class RememberedRouting(Routing):
    """Tells how the model is routed."""

    made: ModelRouting

    def add(self, model: str, made: ModelRouting) -> None:
        self.made = made
        super().add(model, made)


class SimulatedFrontend:
    """The process that routes. Make it by `start`."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        routing: RememberedRouting,
        way: Way,
        held: AsyncExitStack,
    ) -> None:
        self.runtime = runtime
        self._events = cast("MemoryEvents", runtime.events)
        self.way = way
        self.send = way.send
        self._routing = routing
        self._held = held

    @classmethod
    async def start(cls, ground: Ground, name: str, seed: int) -> SimulatedFrontend:
        """Knows the workers that are there."""
        async with AsyncExitStack() as held:
            runtime, lease = await ground.runtime("frontend", name, seed)
            held.push_async_callback(lease.close)
            held.push_async_callback(runtime.shutdown, 0.0)
            watch = Watch(runtime.requests, runtime.clock, runtime.tasks, runtime.metrics)
            routing = RememberedRouting(runtime)
            way = await Way.open(runtime, watch, routing, ground.card)
            held.push_async_callback(way.close)
            return cls(runtime, routing, way, held.pop_all())

    @property
    def policy(self) -> KvPolicy | None:
        """What chooses, in mode kv."""
        policy = self._routing.made.policy
        return policy if isinstance(policy, KvPolicy) else None

    def deafen(self) -> None:
        """No event reaches it any more, and none of its own gets out; its calls do."""
        self._events.sever()

    def hear_again(self) -> None:
        """Events come and go again."""
        self._events.rejoin()

    async def leave(self) -> None:
        """Stop in good order."""
        await self._held.aclose()
