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
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.mock.simulated_engine import make_simulated_engine
from dynamo.inference.mock.timing import StepTiming
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.leases import RepublishingDiscovery
from dynamo.scheduling.router.policies.kv import KvPolicy
from dynamo.services.model_pipeline import ModelPipeline, open_model_pipeline
from dynamo.services.routing import ProcessRouting

MODEL_NAME = "day"
VOCAB_SIZE = 1 << 16
MOCK_VOCABULARY = range(1_000, VOCAB_SIZE)
"""What engines say; none of it ends an answer."""


class SimulatedNetwork(msgspec.Struct, frozen=True):
    """What all processes of a day stand on. `place`: the name of their memory planes; `leaping`:
    engines in the midst of many steps."""

    plane_name: str
    clock: VirtualClock
    engine: EngineInfo
    timing: StepTiming
    mode: str
    fast_forwarding: set[FastForward]

    @property
    def card(self) -> ModelCard:
        """The model that is served. Nobody asks for its files."""
        files = FileRef("tokenizer.json", "0" * 64, 0, "/nowhere")
        engine = self.engine
        return ModelCard(
            (MODEL_NAME,),
            engine.context_tokens,
            VOCAB_SIZE,
            files,
            engine.block_tokens,
            engine=engine,
        )

    async def create_runtime(
        self, role: str, name: str, seed: int
    ) -> tuple[DistributedRuntime, LeasedDiscovery]:
        """A process's runtime, and its lease."""
        settings = Settings()
        planes = {"discovery": self.plane_name, "requests": "memory:", "events": self.plane_name}
        settings = replace(
            settings,
            runtime=replace(settings.runtime, **planes),
            router=replace(settings.router, mode=self.mode),
        )
        made = await DistributedRuntime.create(settings, role=role, name=name, clock=self.clock)
        made.instance_id = name
        made.rng = Random(seed)
        lease = MemoryDiscovery(self.plane_name.partition(":")[2])
        made.discovery = RepublishingDiscovery(lease)
        return made, lease


LeasedDiscovery = MemoryDiscovery


class SimulatedWorker:
    """One worker's process, from start to its end. Make it by `start`."""

    def __init__(
        self,
        name: str,
        runtime: DistributedRuntime,
        lease: LeasedDiscovery,
        worker: EngineWorker,
        engine: BatchedEngine,
        fast_forward: FastForward,
    ) -> None:
        self.name = name
        self.engine = engine
        self.fast_forward = fast_forward
        self.alive = True
        self._runtime = runtime
        self._requests = cast("MemoryRequests", runtime.requests)
        self._events = cast("MemoryEvents", runtime.events)
        self._leased_discovery = lease
        self._worker = worker
        self._lease_expired = False

    @classmethod
    async def start(cls, ground: SimulatedNetwork, name: str, seed: int) -> SimulatedWorker:
        """Ready and announced."""
        engine, leaper = make_simulated_engine(
            ground.engine,
            ground.timing,
            ground.clock,
            wait_until_quiescent=ground.clock.wait_until_idle,
            eviction="reuse",
            vocabulary=MOCK_VOCABULARY,
            fast_forwarding=ground.fast_forwarding,
        )
        runtime, lease = await ground.create_runtime("worker", name, seed)
        worker = EngineWorker(engine, ground.card)
        await worker.attach(runtime)
        return cls(name, runtime, lease, worker, engine, leaper)

    @property
    def partitioned(self) -> bool:
        """Whether the network reaches it not."""
        return self._requests.severed

    def partition(self) -> None:
        """The network reaches it no more."""
        self.fast_forward.catch_up()
        self._requests.sever()
        self._events.sever()

    def expire_lease(self) -> None:
        """Its lease has ended."""
        if self.partitioned and self.alive and not self._lease_expired:
            self._lease_expired = True
            self._leased_discovery.expire_lease()

    def rejoin(self) -> None:
        """The network reaches it again, or what is left of it."""
        self._requests.rejoin()
        if not self.alive:
            return
        self._events.rejoin()
        if self._lease_expired:
            self._lease_expired = False
            self._leased_discovery.lose_lease()

    async def crash(self) -> None:
        """As kill -9 does: it says nothing more, its connections break; discovery and the event
        plane do not know yet."""
        self.fast_forward.catch_up()
        self.alive = False
        self._events.sever()
        self._requests.abort()
        await self.engine.stop()

    async def end_lease(self) -> None:
        """Its lease ends."""
        await self._worker.close()
        await self.shutdown()

    async def shutdown(self) -> None:
        """Stop in good order."""
        if self.alive:
            await self._worker.close()
        await self._runtime.shutdown(0.0)
        await self._runtime.discovery.close()


class SimulatedFrontend:
    """The process that routes. Make it by `start`."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        pipeline: ModelPipeline,
        held: AsyncExitStack,
    ) -> None:
        self.runtime = runtime
        self._events = cast("MemoryEvents", runtime.events)
        self.pipeline = pipeline
        self.send = pipeline.send
        self._exit_stack = held

    @classmethod
    async def start(cls, ground: SimulatedNetwork, name: str, seed: int) -> SimulatedFrontend:
        """Knows the workers that are there."""
        async with AsyncExitStack() as held:
            runtime, lease = await ground.create_runtime("frontend", name, seed)
            held.push_async_callback(lease.close)
            held.push_async_callback(runtime.shutdown, 0.0)
            watch = FailureDetector(runtime.requests, runtime.clock, runtime.tasks, runtime.metrics)
            pipeline = await open_model_pipeline(
                runtime, watch, ProcessRouting(runtime), ground.card
            )
            held.push_async_callback(pipeline.close)
            return cls(runtime, pipeline, held.pop_all())

    @property
    def policy(self) -> KvPolicy | None:
        """What chooses, in mode kv."""
        policy = self.pipeline.policy
        return policy if isinstance(policy, KvPolicy) else None

    def drop_events(self) -> None:
        """No event reaches it any more, and none of its own gets out; its calls do."""
        self._events.sever()

    def resume_events(self) -> None:
        """Events come and go again."""
        self._events.rejoin()

    async def shutdown(self) -> None:
        """Stop in good order."""
        await self._exit_stack.aclose()
