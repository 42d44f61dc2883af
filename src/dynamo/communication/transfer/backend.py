"""The part of the backends that is alike: checks, time limit, breaker and metrics of pulls."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

from dynamo.communication.transfer.converted import ConvertedPeer, MemoryPool
from dynamo.communication.transfer.estimate import PeerBreaker, TransferEstimate
from dynamo.communication.transfer.plane import RegionPeer, TransferPlane, TransferSetup
from dynamo.communication.transfer.region import (
    ANY_GENERATION,
    MAX_READS,
    MemoryRegion,
    RegionDescriptor,
    SlotRead,
)
from dynamo.core.errors import InternalError, TransferFailed

PROBE_BYTES: Final = 512 << 10
PROBE_READS: Final = 3
PROBE_TIMEOUT_S: Final = 5.0
MAX_BREAKERS: Final = 256
TIMEOUT_FACTOR: Final = 4.0
MIN_TIMEOUT_S: Final = 1.0


class TransferBackend(TransferPlane):
    """A plane with one way to carry bytes, called `scheme`."""

    scheme: str

    @classmethod
    async def open(cls, url: str, setup: TransferSetup) -> Self:
        del url
        return cls(setup)

    def __init__(self, setup: TransferSetup) -> None:
        self.clock = setup.clock
        self.incarnation = setup.incarnation
        self.metrics = setup.metrics
        self.metrics.begin(self.scheme)
        self.secret = setup.secret
        self.region: MemoryRegion | None = None
        self.layout = ""
        self._keeps_region = False
        self.peers: dict[RegionPeer, None] = {}
        self.pool_bytes = setup.options.pool_bytes
        self._breakers: dict[str, PeerBreaker] = {}

    async def expose(self, region: MemoryRegion, layout: str) -> RegionDescriptor:
        if self.region is not None:
            raise InternalError("a transfer plane exposes one region, and does so already")
        self.region, self.layout = region, layout
        region.keep()
        self._keeps_region = True
        endpoint = await self._listen()
        size = region.peer_slots, region.slot_bytes
        self.descriptor = RegionDescriptor(
            *size, layout, (endpoint,), self.incarnation, region.kv_layout
        )
        return self.descriptor

    async def probe(self, descriptor: RegionDescriptor) -> float:
        """Return the seconds of the quickest of `PROBE_READS` reads from a peer. A read has about
        `PROBE_BYTES`, one slot or more, which are dropped. Raises `TransferFailed`."""
        size = descriptor.slot_bytes
        pool = MemoryPool.allocate(size, min(max(PROBE_BYTES, size), descriptor.slots * size))
        reads = [SlotRead(slot, ANY_GENERATION, slot) for slot in range(pool.free_slots)]
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                peer = await self._connect(descriptor, pool.region)
                try:
                    return min([await self._time_pull(peer, reads) for _ in range(PROBE_READS)])
                finally:
                    await peer.close()
        except TimeoutError:
            text = f"a read of {len(reads) * size} bytes took more than {PROBE_TIMEOUT_S:g} s"
            raise TransferFailed.of("timeout", text) from None
        finally:
            pool.region.close()

    async def _time_pull(self, peer: RegionPeer, reads: Sequence[SlotRead]) -> float:
        started_s = self.clock.now()
        await peer.pull(reads)
        return self.clock.now() - started_s

    async def connect(self, descriptor: RegionDescriptor) -> RegionPeer:
        region = self.region
        if region is None:
            raise InternalError("a transfer plane connects after its own region is exposed")
        with self.guard(descriptor.incarnation):
            own = self.descriptor
            peer: RegionPeer
            if reason := descriptor.refusal(own):
                hint = "serve both workers with the same model, weights and --block-size"
                raise TransferFailed.of("refused", f"no blocks of the peer fit: {reason}", hint)
            if (descriptor.layout, descriptor.slot_bytes) == (own.layout, own.slot_bytes):
                peer = await self._connect(descriptor, region)
            else:
                pool = MemoryPool.allocate(descriptor.slot_bytes, self.pool_bytes)
                peer = await self._connect_converted(descriptor, region, pool)
        self.peers[peer] = None
        return peer

    async def _connect_converted(
        self, descriptor: RegionDescriptor, region: MemoryRegion, pool: MemoryPool
    ) -> RegionPeer:
        try:
            return ConvertedPeer(await self._connect(descriptor, pool.region), pool, region)
        except BaseException:
            pool.region.close()
            raise

    async def close(self) -> None:
        for peer in tuple(self.peers):
            await peer.close()
        if self._keeps_region and self.region is not None:
            self._keeps_region = False
            self.region.release()

    @contextmanager
    def guard(self, incarnation: str) -> Iterator[None]:
        """Count failures of a peer. Raises `TransferFailed` while its breaker is open.

        The breaker counts errors after which the next attempt would likely fail too.
        """
        breaker, started_s = self._breaker(incarnation), self.clock.now()
        if not breaker.start(started_s):
            self.metrics.failures.labels(self.scheme, "refused").inc()
            text = f"the peer {incarnation} ({self.scheme}) failed repeatedly and is left out now"
            raise TransferFailed.of("refused", text)
        try:
            yield
        except TransferFailed as error:
            self.metrics.failures.labels(self.scheme, error.reason).inc()
            if error.reason in {"stale", "refused"}:
                breaker.on_cancelled()
            else:
                breaker.on_failure(started_s, self.clock.now())
            raise
        except BaseException:
            breaker.on_cancelled()
            raise
        breaker.on_success()

    def is_spared(self, incarnation: str) -> bool:
        """Whether a pull from a peer would be refused now because of its failures."""
        breaker = self._breakers.get(incarnation)
        return breaker is not None and breaker.is_open(self.clock.now())

    @abstractmethod
    async def _listen(self) -> str:
        """Serve the region. Returns the endpoint."""

    @abstractmethod
    async def _connect(self, descriptor: RegionDescriptor, region: MemoryRegion) -> BackendPeer:
        """Connect to a peer, whose slots are as large as those of `region`; this is the exposed one
        or a pool for blocks to convert. Raises `TransferFailed`."""

    def endpoint_of(self, descriptor: RegionDescriptor) -> str:
        """Return the peer's endpoint of this backend.

        Raises `TransferFailed` if there is none that this process can reach.
        """
        prefix = f"{self.scheme}:"
        for endpoint in descriptor.endpoints:
            if endpoint.startswith(prefix):
                return endpoint
        text = f"the peer {descriptor.incarnation} has no endpoint {prefix}"
        raise TransferFailed.of("refused", text, "give all workers the same --transfer-plane")

    def _breaker(self, incarnation: str) -> PeerBreaker:
        """The breaker of a peer, which outlives its `RegionPeer`."""
        breaker = self._breakers.get(incarnation)
        if breaker is None:
            if len(self._breakers) >= MAX_BREAKERS:
                del self._breakers[next(iter(self._breakers))]
            breaker = self._breakers[incarnation] = PeerBreaker()
        return breaker


class BackendPeer(RegionPeer):
    """A peer of a `TransferBackend`. A subclass copies the bytes in `_copy`."""

    def __init__(
        self,
        plane: TransferBackend,
        descriptor: RegionDescriptor,
        region: MemoryRegion,
        estimate: TransferEstimate,
    ) -> None:
        self.descriptor = descriptor
        self.backend = plane.scheme
        self._plane = plane
        self._region = region
        self._clock = plane.clock
        self._estimate = estimate
        self._running = 0
        self._unused = asyncio.Event()
        self._name = f"the peer {descriptor.incarnation} ({plane.scheme})"

    @property
    def available(self) -> bool:
        return not self._plane.is_spared(self.descriptor.incarnation)

    def predict_s(self, size_bytes: int) -> float:
        return self._estimate.predict_s(size_bytes)

    async def pull(self, reads: Sequence[SlotRead], timeout_s: float | None = None) -> None:
        if not reads:
            return
        size = len(reads) * self._region.slot_bytes
        if timeout_s is None:
            timeout_s = MIN_TIMEOUT_S + TIMEOUT_FACTOR * self.predict_s(size)
        started_s = self._clock.now()
        with self._plane.guard(self.descriptor.incarnation):
            self._check(reads)
            self._estimate.start(size, started_s)
            self._running += 1
            completed = False
            try:
                await self._copy_in_time(reads, timeout_s)
                completed = True
            finally:
                self._estimate.finish(size, self._clock.now(), completed=completed)
                self._running -= 1
                if not self._running:
                    self._unused.set()
        metrics = self._plane.metrics
        metrics.bytes.labels(self.backend).inc(size)
        metrics.seconds.labels(self.backend).observe(self._clock.now() - started_s)

    async def close(self) -> None:
        self._plane.peers.pop(self, None)
        await self._close()
        while self._running:
            self._unused.clear()
            await self._unused.wait()

    @abstractmethod
    async def _close(self) -> None:
        """Make the pulls in flight fail soon."""

    @abstractmethod
    async def _copy(self, reads: Sequence[SlotRead]) -> None:
        """Copy and verify. Raises `TransferFailed`. Cancelled, it returns when no thread writes."""

    async def _copy_in_time(self, reads: Sequence[SlotRead], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._copy(reads)
        except TimeoutError:
            text = f"{self._name} did not deliver {len(reads)} blocks within {timeout_s:.1f} s"
            raise TransferFailed.of("timeout", text) from None

    def _divide(
        self, reads: Sequence[SlotRead], max_parts: int, min_part_bytes: int
    ) -> list[Sequence[SlotRead]]:
        """Divide reads into at most `max_parts` equal parts, for copies side by side.
        Very many reads are more parts."""
        size = len(reads) * self._region.slot_bytes
        per_part = -(-len(reads) // max(1, min(max_parts, size // min_part_bytes)))
        per_part = min(per_part, MAX_READS)
        return [reads[start : start + per_part] for start in range(0, len(reads), per_part)]

    def _check(self, reads: Sequence[SlotRead]) -> None:
        sources, targets = self.descriptor.slots, self._region.slots
        for read in reads:
            if not (0 <= read.source < sources and 0 <= read.target < targets):
                text = f"slot {read.source} of {sources} into slot {read.target} of {targets}"
                raise TransferFailed.of("refused", f"{self._name}: no such slots: {text}")
