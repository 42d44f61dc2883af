"""The part of a pull that all backends share: checks, time limit, breaker, metrics."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

from dynamo.communication.transfer.estimate import PeerBreaker, TransferEstimate
from dynamo.communication.transfer.metrics import TransferMetrics
from dynamo.communication.transfer.plane import RegionPeer
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.core.clock import Clock
from dynamo.core.errors import TransferFailed

TIMEOUT_FACTOR: Final = 4.0
MIN_TIMEOUT_S: Final = 1.0


class TrackedPeer(RegionPeer):
    """A peer of any backend. A subclass copies the bytes in `_copy`."""

    def __init__(
        self,
        descriptor: RegionDescriptor,
        region: MemoryRegion,
        clock: Clock,
        estimate: TransferEstimate,
        breaker: PeerBreaker,
        metrics: TransferMetrics,
    ) -> None:
        self.descriptor = descriptor
        self._region = region
        self._clock = clock
        self._estimate = estimate
        self._breaker = breaker
        self._metrics = metrics

    @property
    def available(self) -> bool:
        return not self._breaker.is_open(self._clock.now())

    def predict_s(self, size_bytes: int) -> float:
        return self._estimate.predict_s(size_bytes)

    async def pull(self, reads: Sequence[SlotRead], timeout_s: float | None = None) -> None:
        if not reads:
            return
        self._check(reads)
        size = len(reads) * self._region.slot_bytes
        if timeout_s is None:
            timeout_s = MIN_TIMEOUT_S + TIMEOUT_FACTOR * self.predict_s(size)
        started_s = self._clock.now()
        if not self._breaker.start(started_s):
            self._count_failure("refused")
            raise TransferFailed.of("refused", f"{self._name} failed repeatedly and is spared now")
        self._estimate.start(size, started_s)
        completed = False
        try:
            await self._copy_in_time(reads, timeout_s)
            completed = True
            self._breaker.on_success()
        except TransferFailed as error:
            self._count_failure(error.reason)
            if error.reason == "stale":  # the peer answers: it only needed the block
                self._breaker.on_success()
            else:
                self._breaker.on_failure(started_s, self._clock.now())
            raise
        except BaseException:
            self._breaker.on_cancelled()
            raise
        finally:
            self._estimate.finish(size, self._clock.now(), completed=completed)
        self._metrics.bytes.labels(self.backend).inc(size)
        self._metrics.seconds.labels(self.backend).observe(self._clock.now() - started_s)

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

    @property
    def _name(self) -> str:
        return f"the peer {self.descriptor.incarnation} ({self.backend})"

    def _check(self, reads: Sequence[SlotRead]) -> None:
        sources, targets = self.descriptor.slots, self._region.slots
        for read in reads:
            if not (0 <= read.source < sources and 0 <= read.target < targets):
                text = f"slot {read.source} of {sources} into slot {read.target} of {targets}"
                raise TransferFailed.of("refused", f"{self._name}: no such slots: {text}")

    def _count_failure(self, reason: str) -> None:
        self._metrics.failures.labels(self.backend, reason).inc()
