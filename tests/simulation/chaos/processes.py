"""Simulated worker and frontend processes, each with its own planes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import cast

import msgspec
from msgspec.structs import replace

from dynamo.communication.discovery.memory import MemoryDiscovery
from dynamo.communication.events.memory import MemoryEvents
from dynamo.communication.requests.memory import MemoryRequests
from dynamo.communication.transfer import MemoryRegion, TransferPlane
from dynamo.communication.transfer.memory import MemoryTransfer
from dynamo.core.errors import TransferFailed
from dynamo.core.settings import Settings
from dynamo.core.timing.model import StepTiming
from dynamo.core.values import EngineInfo
from dynamo.core.virtual_time import VirtualClock
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.kv_source import ArrivalCounters
from dynamo.inference.mock.runner import DIGEST_BYTES
from dynamo.inference.mock.simulated_engine import make_simulated_engine
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.tiers.kv_tiers import OpenedTiers
from dynamo.inference.tiers.tier import KvTier, TierBlock
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.operations.replay.workers import SimulatedTier, SimulatedTiers
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.discovery import RepublishingDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.services.model_pipeline import open_model_pipeline
from dynamo.services.routing import ProcessRouting

MODEL_NAME = "day"
DELIVERY_INTERVAL_S = 0.05
VOCAB_SIZE = 1 << 16
MOCK_VOCABULARY = range(1_000, VOCAB_SIZE)
"""The ids that engines generate. None of them ends an answer."""
TRANSFER_URL = "memory:?gbps=0.00001&latency_ms=1"
"""The digests of 64 blocks take 51 ms, so that faults happen during transfers."""


class FlakyTiers(SimulatedTiers):
    """Tiers of which a share of the loads and stores fails, half way."""

    def __init__(
        self, tiers: Sequence[SimulatedTier], clock: VirtualClock, fault_share: float, rng: Random
    ) -> None:
        super().__init__(tiers, clock)
        self._fault_share = fault_share
        self._rng = rng
        self.loaded_blocks = Counter[str]()

    async def open(self, engine: EngineCore, info: EngineInfo) -> OpenedTiers:
        opened = await super().open(engine, info)
        for tier in opened.tiers:
            self._damage(tier)
        return opened

    def _damage(self, tier: KvTier) -> None:
        load, store = tier.load, tier.store

        async def load_in_part(
            blocks: Sequence[TierBlock], on_loaded: Callable[[int], None]
        ) -> None:
            if self._rng.random() >= self._fault_share:
                await load(blocks, on_loaded)
                self.loaded_blocks[tier.name] += len(blocks)
                return
            await load(blocks[: len(blocks) // 2], on_loaded)
            tier.counters.failures += 1
            raise TransferFailed.of("gone", "a fault of the simulation")

        async def store_in_part(blocks: Sequence[TierBlock]) -> int:
            if self._rng.random() >= self._fault_share:
                return await store(blocks)
            tier.counters.failures += 1
            return await store(blocks[: len(blocks) // 2])

        tier.load = load_in_part  # type: ignore[method-assign]
        tier.store = store_in_part  # type: ignore[method-assign]


class SimulatedRuntime(DistributedRuntime):
    """The runtime of a process, whose transfer planes a fault can cut."""

    transfers: Sequence[MemoryTransfer] = ()

    async def open_transfer(self) -> TransferPlane:
        plane = await super().open_transfer()
        self.transfers = (*self.transfers, cast("MemoryTransfer", plane))
        return plane


class SimulatedNetwork(msgspec.Struct):
    """Shared by all processes of a run. `plane_name` names their memory planes. `fast_forwarding`
    holds the engines that skip steps. Their tokens are due at `next_delivery_s`. `engine` describes
    each of a worker's `data_parallel` ranks. Workers compute prompts for each other unless
    `disaggregation` is off. `arrivals` counts those of each engine, also of dead ones. Frontends ask
    `routers` if there are any, and these the `shared_index` of an indexer."""

    plane_name: str
    clock: VirtualClock
    engine: EngineInfo
    timing: StepTiming
    mode: str
    fast_forwarding: dict[FastForward, None] = {}
    next_delivery_s: float = 0.0
    data_parallel: int = 1
    disaggregation: str = "off"
    arrivals: list[ArrivalCounters] = []
    tiers: FlakyTiers | None = None
    model: str = MODEL_NAME
    routers: int = 0
    shared_index: bool = False

    @property
    def card(self) -> ModelCard:
        """The card of the served model. Its files are never requested."""
        files = FileRef("tokenizer.json", "0" * 64, 0, "/nowhere")
        engine = self.engine
        return ModelCard(
            (self.model,),
            engine.context_tokens,
            VOCAB_SIZE,
            files,
            engine.block_tokens,
            engine=engine,
        )

    def create_engine(self) -> BatchedEngine:
        """Return a new engine. Its region has digests of the blocks, which arrivals check."""
        shares = self.disaggregation != "off" or bool(self.tiers)
        region = MemoryRegion.allocate(self.engine.num_blocks, DIGEST_BYTES) if shares else None
        engine, _ = make_simulated_engine(
            self.engine,
            self.timing,
            self.clock,
            wait_until_quiescent=self.clock.wait_until_idle,
            eviction="reuse",
            vocabulary=MOCK_VOCABULARY,
            fast_forwarding=self.fast_forwarding,
            region=region,
            open_tiers=None if self.tiers is None else self.tiers.open,
        )
        self.arrivals.append(engine.arrivals.counters)
        return engine

    def deliver_tokens(self) -> None:
        """Deliver the tokens of engines that skip steps, once in `DELIVERY_INTERVAL_S`."""
        now = self.clock.now()
        if now >= self.next_delivery_s:
            self.next_delivery_s = now + DELIVERY_INTERVAL_S
            for engine in tuple(self.fast_forwarding):
                engine.catch_up()

    async def create_runtime(
        self, role: str, name: str, seed: int, worker_role: str = "both"
    ) -> tuple[SimulatedRuntime, MemoryDiscovery]:
        """Return a process's runtime and the discovery that holds its lease."""
        settings = Settings()
        planes = {"discovery": self.plane_name, "requests": "memory:", "events": self.plane_name}
        disaggregation = replace(settings.router.disaggregation, mode=self.disaggregation)
        settings = replace(
            settings,
            runtime=replace(settings.runtime, transfer=TRANSFER_URL, **planes),
            router=replace(
                settings.router,
                mode=self.mode,
                disaggregation=disaggregation,
                replicas=self.routers,
            ),
            index=replace(settings.index, shared=self.shared_index),
            observer=replace(settings.observer, enabled=False),
            engine=replace(settings.engine, role=worker_role),
        )
        runtime = await SimulatedRuntime.create(settings, role=role, name=name, clock=self.clock)
        runtime.instance_id = name
        runtime.rng = Random(seed)
        leased_discovery = MemoryDiscovery(self.plane_name.partition(":")[2])
        runtime.discovery = RepublishingDiscovery(leased_discovery)
        return runtime, leased_discovery


class SimulatedWorker:
    """A worker process."""

    def __init__(self, network: SimulatedNetwork, name: str, role: str = "both") -> None:
        self.name = name
        self.role = role
        self.ranks = [network.create_engine() for _ in range(network.data_parallel)]
        self.engine = DataParallelEngine(self.ranks) if len(self.ranks) > 1 else self.ranks[0]
        self.alive = True
        self._network = network
        self._worker = EngineWorker(self.engine, network.card)
        self._lease_expired = False

    async def start(self, seed: int) -> None:
        """Start the worker and wait until it is announced."""
        create_runtime = self._network.create_runtime
        self._runtime, self._leased_discovery = await create_runtime(
            "worker", self.name, seed, self.role
        )
        self._requests = cast("MemoryRequests", self._runtime.requests)
        self._events = cast("MemoryEvents", self._runtime.events)
        await self._worker.attach(self._runtime)

    @property
    def engines(self) -> dict[str, BatchedEngine]:
        """The engine of each rank, by the name that routers use."""
        if len(self.ranks) == 1:
            return {self.name: self.ranks[0]}
        return {f"{self.name}/{rank}": engine for rank, engine in enumerate(self.ranks)}

    @property
    def partitioned(self) -> bool:
        """Whether the network is cut."""
        return self._requests.network.severed

    def partition(self) -> None:
        """Cut the worker off from the network."""
        self._catch_up()
        self._requests.network.sever()
        self._events.network.sever(breaks=True)
        for plane in self._runtime.transfers:
            plane.sever()

    def expire_lease(self) -> None:
        """End the worker's lease while it is partitioned."""
        if self.partitioned and self.alive and not self._lease_expired:
            self._lease_expired = True
            self._leased_discovery.expire_lease()

    def rejoin(self) -> None:
        """Connect the worker to the network again. A dead one stays silent."""
        self._requests.network.rejoin()
        for plane in self._runtime.transfers:
            plane.rejoin()
        if not self.alive:
            return
        self._events.network.rejoin()
        if self._lease_expired:
            self._lease_expired = False
            self._leased_discovery.lose_lease()

    async def crash(self) -> None:
        """Kill the process as kill -9 does. Its connections break. Discovery and the event plane do
        not know yet."""
        self._catch_up()
        self.alive = False
        self._events.network.sever(breaks=True)
        self._requests.abort()
        for plane in self._runtime.transfers:
            plane.abort()
        await self.engine.stop()

    def _catch_up(self) -> None:
        for rank in self.ranks:
            rank.catch_up()

    async def end_lease(self) -> None:
        """End the lease of a dead worker and release it."""
        await self._worker.close()
        await self.shutdown()

    async def shutdown(self) -> None:
        """Stop the process regularly."""
        if self.alive:
            await self._worker.close()
        await self._runtime.shutdown(0.0)
        await self._runtime.discovery.close()


class SimulatedFrontend:
    """A frontend process, which routes requests."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self.name = name
        self._network = network

    async def start(self, seed: int) -> None:
        """Start the frontend and wait until it knows the workers."""
        network = self._network
        runtime, self._discovery = await network.create_runtime("frontend", self.name, seed)
        self.runtime = runtime
        self.events = cast("MemoryEvents", runtime.events)
        failure_detector = FailureDetector(
            runtime.requests, runtime.clock, runtime.tasks, runtime.metrics
        )
        self.pipeline = await open_model_pipeline(
            runtime, failure_detector, ProcessRouting(runtime), network.card
        )

    async def shutdown(self) -> None:
        """Stop the process regularly."""
        await self.pipeline.close()
        await self.runtime.shutdown(0.0)
        await self._discovery.close()
