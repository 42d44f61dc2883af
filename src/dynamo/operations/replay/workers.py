"""The workers of a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from dynamo.communication.transfer import RegionPeer, TransferPlane
from dynamo.communication.transfer.memory import MemoryTransfer
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError
from dynamo.core.kv_events import worker_name
from dynamo.core.reply import Engine
from dynamo.core.timing.model import StepTiming
from dynamo.core.values import EngineInfo, GenerateRequest, Tier
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.disaggregation.peer_prefill import FindPeer, PeerPrefill, PrefillPeer
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.kv_source import PrefillSink
from dynamo.inference.load_publisher import LoadPublisher
from dynamo.inference.mock.engine import KV_BYTES_PER_TOKEN
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.tiers.copies import CopyLink, TimedCopies
from dynamo.inference.tiers.kv_tiers import OpenedTiers
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.resident_blocks import ResidentBlocks

MAX_WORKERS = 100_000


class ReplayGroup(msgspec.Struct, frozen=True):
    """`count` equal workers. `engine` names their roles, `name` their kind."""

    count: int
    engine: EngineInfo
    timing: StepTiming
    name: str = ""

    @property
    def kind(self) -> str:
        """The name of the kind, as deployments call it."""
        roles = self.engine.roles
        return self.name or (f"{roles[0]}-worker" if len(roles) == 1 else "worker")


class SimulatedTier(msgspec.Struct, frozen=True):
    """A tier of `blocks` that loads and stores at `bytes_per_s` each. Engines have one each, except
    that of the tier `shared`, which is one for all."""

    name: Tier
    blocks: int
    bytes_per_s: float


def check_count(workers: int) -> None:
    """Raise `ConfigError` for more workers than a replay simulates."""
    if workers > MAX_WORKERS:
        hint = f"a replay simulates {MAX_WORKERS:,} at most"
        raise ConfigError(f"{workers:,} workers are too many", hint=hint)


class ReplayWorkers(msgspec.Struct, frozen=True):
    """The workers of all `groups`, numbered in their order, with `ranks` engines each, which step
    together in `lockstep`. All have the same `block_tokens`. Workers compute prompts for each other
    only if there is a `transfer`: the bytes per second of each engine's link, both directions
    together. `tiers` lie below the blocks of each engine."""

    groups: Sequence[ReplayGroup]
    eviction: str
    ranks: int = 1
    lockstep: bool = False
    prefix_caching: bool = True
    transfer: float | None = None
    tiers: Sequence[SimulatedTier] = ()
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN

    def make_region(self, engine: EngineInfo) -> MemoryRegion | None:
        """Return the memory of an engine's blocks, of which only the generations exist; None if no
        block leaves its engine."""
        if self.transfer is None and not self.tiers:
            return None
        slot_bytes = engine.block_tokens * self.kv_bytes_per_token
        return MemoryRegion.allocate(engine.num_blocks, slot_bytes, with_memory=False)

    @property
    def count(self) -> int:
        """The number of workers."""
        return sum(group.count for group in self.groups)

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""
        return self.groups[0].engine.block_tokens

    def names_of(self, number: int) -> Sequence[str]:
        """Return the name of the worker of that number, or those of its ranks."""
        ranks = range(self.ranks) if self.ranks > 1 else (None,)
        return [worker_name(str(number), rank) for rank in ranks]

    def __iter__(self) -> Iterator[ReplayGroup]:
        """Yield the group of each worker."""
        for group in self.groups:
            for _ in range(group.count):
                yield group


class ReplayWorker:
    """A worker of the cluster: an engine for each rank, and their links if KV is moved."""

    def __init__(
        self, worker_id: str, names: Sequence[str], ranks: Sequence[BatchedEngine], clock: Clock
    ) -> None:
        """`names`: those of the `ranks`. `info`, `record_key`: set when it is announced."""
        self.id = worker_id
        self.names = names
        self.ranks = ranks
        self.engine: Engine = ranks[0] if len(ranks) == 1 else DataParallelEngine(ranks)
        self.load_publisher: LoadPublisher | None = None
        self.info: EngineInfo
        self.record_key = ""
        self.regions: list[RegionDescriptor] = []
        self._clock = clock
        self._planes: list[TransferPlane] = []

    async def stop(self) -> None:
        """Stop the engines, and close their links."""
        await self.engine.stop()
        for plane in self._planes:
            await plane.close()
        self._planes.clear()

    async def open_links(self, bytes_per_s: float, workers: Mapping[str, ReplayWorker]) -> None:
        """Let the engines read the memory of those of the other `workers`, which call each other
        directly. Call after the start of the engines."""
        for name, engine in zip(self.names, self.ranks, strict=True):
            plane = MemoryTransfer(self._clock, bytes_per_s=bytes_per_s)
            self._planes.append(plane)
            assert engine.runner.region is not None  # noqa: S101 - made with links
            self.regions.append(await plane.expose(engine.runner.region, layout="replay"))
            engine.kv_source = source = PeerPrefill(_finder(plane, workers), self._clock, name)
            source.bytes_per_s = bytes_per_s  # as learnt: a trace is no test of learning it

    def on_load_changed(self) -> None:
        """Publish the load soon, because a request has arrived."""
        if self.load_publisher is not None:
            self.load_publisher.on_load_changed()


def _finder(plane: TransferPlane, workers: Mapping[str, ReplayWorker]) -> FindPeer:
    peers: dict[str, ReplayPeer] = {}

    async def find(worker_id: str) -> ReplayPeer | None:
        worker = workers.get(worker_id)
        if worker is not None and worker_id not in peers:
            peers[worker_id] = ReplayPeer(plane, worker)
        return peers[worker_id] if worker is not None else None

    return find


class ReplayPeer(PrefillPeer):
    """A prefill worker that is called without a request plane."""

    def __init__(self, plane: TransferPlane, worker: ReplayWorker) -> None:
        self.ranks = len(worker.ranks)
        self._plane = plane
        self._worker = worker
        self._regions: dict[int, RegionPeer] = {}

    async def connect(self, rank: int) -> RegionPeer:
        if rank not in self._regions:
            self._regions[rank] = await self._plane.connect(self._worker.regions[rank])
        return self._regions[rank]

    async def prefill(
        self,
        rank: int,
        request: GenerateRequest,
        context: Context,
        have_blocks: int,
        sink: PrefillSink,
    ) -> None:
        self._worker.on_load_changed()
        await self._worker.ranks[rank].prefill(request, context, have_blocks, sink)


_Parts = tuple[ResidentBlocks, CopyLink, CopyLink, dict[int, bytes]]
"""The blocks of a tier, its links for loads and stores, and its bytes."""


class SimulatedTiers:
    """Opens the tiers of all engines. Their copies take time, and move nothing unless there is
    memory."""

    def __init__(self, tiers: Sequence[SimulatedTier], clock: Clock) -> None:
        self._tiers = tiers
        self._clock = clock
        self._shared: _Parts | None = None

    async def open(self, engine: EngineCore, info: EngineInfo) -> OpenedTiers:
        """Return the tiers of one engine (an `OpenTiers`)."""
        del info
        region = engine.runner.region
        assert region is not None  # noqa: S101 - engines with simulated tiers have one
        tiers = []
        for tier in self._tiers:
            resident, loads, stores, contents = self._parts(tier)
            tiers.append(
                MemoryTier(
                    resident,
                    TimedCopies(region, loads, stores, contents, engine.catch_up),
                    block_bytes=region.slot_bytes,
                    source_generations=region.generations,
                    exclusive=tier is self._tiers[0] and tier.name != "shared",
                )
            )
        return OpenedTiers(tiers)

    def _parts(self, tier: SimulatedTier) -> _Parts:
        if tier.name == "shared" and self._shared is not None:
            return self._shared
        clock, bytes_per_s = self._clock, tier.bytes_per_s
        links = CopyLink(clock, bytes_per_s), CopyLink(clock, bytes_per_s)
        contents: dict[int, bytes] = {}
        parts = ResidentBlocks(tier.name, tier.blocks, clock), *links, contents
        if tier.name == "shared":
            self._shared = parts
        return parts
