"""The transfer plane within one process, in the time of its clock: bandwidth, latency, queues."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final, Self
from urllib.parse import parse_qsl, urlsplit

from dynamo.communication.transfer.backend import BackendPeer, TransferBackend
from dynamo.communication.transfer.estimate import TransferEstimate
from dynamo.communication.transfer.plane import TransferMetrics, TransferSetup
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError, TransferFailed, TransferFailure

MAX_BYTES_PER_S: Final = 1e12

_planes: dict[str, MemoryTransfer] = {}


class MemoryTransfer(TransferBackend):
    """The backend `memory:?gbps=64&latency_ms=0.1` (GB/s). Each object stands for one process.

    A pull occupies the link of its source and that of its target for bytes / bandwidth; pulls wait
    in line for both. Regions without memory move nothing, but take the same time.
    """

    scheme = "memory"

    def __init__(
        self,
        clock: Clock,
        *,
        bytes_per_s: float = math.inf,
        latency_s: float = 0.0,
        metrics: TransferMetrics | None = None,
    ) -> None:
        super().__init__(TransferSetup(clock=clock, metrics=metrics or TransferMetrics()))
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.free_at_s = 0.0
        self.severed = False
        self.pulls: dict[_Pull, None] = {}

    @classmethod
    async def open(cls, url: str, setup: TransferSetup) -> Self:
        """Create a plane. All `memory:` planes of this process can connect to each other."""
        speed = _parse_speed(url)
        plane = cls(setup.clock, metrics=setup.metrics)
        plane.bytes_per_s = speed.get("gbps", math.inf) * 1e9 or math.inf
        plane.latency_s = speed.get("latency_ms", 0.0) / 1e3
        return plane

    async def _listen(self) -> str:
        _planes[self.incarnation] = self
        return f"memory://{self.incarnation}"

    async def _connect(self, descriptor: RegionDescriptor, region: MemoryRegion) -> BackendPeer:
        source = _planes.get(descriptor.incarnation)
        if source is None or self.severed or source.severed:
            raise TransferFailed.of("gone", f"no process {descriptor.incarnation} exposes memory")
        return MemoryPeer(self, source, descriptor, region)

    async def close(self) -> None:
        self.abort()
        await super().close()

    def abort(self) -> None:
        """End the process as a crash would: pulls from and into its region fail."""
        _planes.pop(self.incarnation, None)
        for pull in tuple(self.pulls):
            pull.fail("gone", f"the process {self.incarnation} is gone")

    def sever(self) -> None:
        """Hold all pulls from and into this process, like a broken network. For tests."""
        self.severed = True

    def rejoin(self) -> None:
        """End `sever`: the pulls that were held end now."""
        self.severed = False
        for pull in tuple(self.pulls):
            pull.end_if_held()


class MemoryPeer(BackendPeer):
    """The region of another `MemoryTransfer`."""

    def __init__(
        self,
        target: MemoryTransfer,
        source: MemoryTransfer,
        descriptor: RegionDescriptor,
        region: MemoryRegion,
    ) -> None:
        estimate = TransferEstimate(target.latency_s, min(target.bytes_per_s, MAX_BYTES_PER_S))
        super().__init__(target, descriptor, region, estimate)
        self._target = target
        self._source = source
        self._pulls: dict[_Pull, None] = {}
        self._closed = False

    def predict_s(self, size_bytes: int) -> float:
        """Compute the seconds from the queues of both links."""
        target, source, now = self._target, self._source, self._clock.now()
        waiting_s = max(now, target.free_at_s, source.free_at_s) - now
        return waiting_s + size_bytes / target.bytes_per_s + target.latency_s

    async def _close(self) -> None:
        self._closed = True
        for pull in tuple(self._pulls):
            pull.fail("gone", "this process closed its connection to the peer")

    async def _copy(self, reads: Sequence[SlotRead]) -> None:
        target, source = self._target, self._source
        if self._closed or source.incarnation not in _planes:
            raise TransferFailed.of("gone", f"{self._name} is gone")
        self._check_generations(reads)
        pull = _Pull(target, source, len(reads) * self._region.slot_bytes)
        self._pulls[pull] = None
        try:
            await pull.wait()
        finally:
            del self._pulls[pull]
        self._check_generations(reads)
        region = source.region
        if region is not None and region.has_memory and self._region.has_memory:
            with (
                region.reading([read.source for read in reads]) as slots,
                self._region.writing([read.target for read in reads]) as views,
            ):
                for view, slot in zip(views, slots, strict=True):
                    view[:] = slot

    def _check_generations(self, reads: Sequence[SlotRead]) -> None:
        region = self._source.region
        if region is None:
            raise TransferFailed.of("gone", f"{self._name} is gone")
        generations = region.generations
        for read in reads:
            if generations[read.source] != read.generation:
                text = f"{self._name} uses block {read.source} for something else now"
                raise TransferFailed.of("stale", text)


class _Pull:
    """The time of one pull: its place in the queues of both links, and its end."""

    def __init__(self, target: MemoryTransfer, source: MemoryTransfer, size_bytes: int) -> None:
        clock = self._clock = target.clock
        self._links: Final = (target, source)
        self._start_s = max(clock.now(), target.free_at_s, source.free_at_s)
        self._end_s = self._start_s + size_bytes / target.bytes_per_s
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_held = False
        for link in self._links:
            link.free_at_s = self._end_s
            link.pulls[self] = None

    async def wait(self) -> None:
        """Wait until the bytes have arrived. Raises `TransferFailed`."""
        stop = self._clock.call_at(self._end_s + self._links[0].latency_s, self._on_time)
        try:
            await self._end
        except BaseException:
            self._leave_queue()
            raise
        finally:
            stop()
            for link in self._links:
                link.pulls.pop(self, None)

    def fail(self, reason: TransferFailure, text: str) -> None:
        """End the pull with an error."""
        if not self._end.done():
            self._end.set_exception(TransferFailed.of(reason, text))

    def end_if_held(self) -> None:
        """End a pull whose time is over and that waited for the network."""
        if self._is_held:
            self._on_time()

    def _on_time(self) -> None:
        self._is_held = any(link.severed for link in self._links)
        if not (self._is_held or self._end.done()):
            self._end.set_result(None)

    def _leave_queue(self) -> None:
        """Give the rest of the time back, unless another pull waits behind already."""
        for link in self._links:
            if link.free_at_s == self._end_s:
                link.free_at_s = max(self._start_s, min(self._clock.now(), self._end_s))


def _parse_speed(url: str) -> dict[str, float]:
    try:
        speed = {key: float(value) for key, value in parse_qsl(urlsplit(url).query)}
        valid = speed.keys() <= {"gbps", "latency_ms"} and all(n >= 0 for n in speed.values())
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{url!r} does not say how fast the transfer plane is",
            hint="write memory: or memory:?gbps=64&latency_ms=0.1",
            param="runtime.transfer",
        )
    return speed
