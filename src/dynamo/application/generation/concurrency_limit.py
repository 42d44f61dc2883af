"""The limits on requests in progress of each model (`server.max_concurrent_requests`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo.core.errors import Overloaded


class ConcurrencyLimit:
    """A semaphore whose waiters are served in order and limited to `waiting_limit`."""

    def __init__(self, limit: int, waiting_limit: int) -> None:
        self.limit = limit
        self.waiting_limit = waiting_limit
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    def try_acquire(self) -> bool:
        """Acquire a slot if one is free and no request waits."""
        if self._waiting or self.running >= self.limit:
            return False
        self.running += 1
        return True

    async def acquire(self) -> None:
        """Acquire a slot, waiting if necessary. Raises `Overloaded` if too many wait already."""
        if self.try_acquire():
            return
        if len(self._waiting) >= self.waiting_limit:
            raise Overloaded(
                f"{self.running} requests run and {len(self._waiting)} wait already",
                hint="limits: server.max_concurrent_requests, server.max_waiting_requests",
                retry_after_s=1,
            )
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.release()
            elif slot in self._waiting:  # release() may have dropped the cancelled waiter
                self._waiting.remove(slot)
            raise

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot during the block. Raises as `acquire`."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()

    def update_limits(self, limit: int, waiting_limit: int) -> None:
        """Apply other limits. Requests that run or wait already are not rejected."""
        self.limit, self.waiting_limit = limit, waiting_limit
        self._admit_waiting()

    def release(self) -> None:
        """Release a slot; the request that waits longest gets it."""
        self.running -= 1
        if self._waiting:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self.running < self.limit:
            slot = self._waiting.popleft()
            if not slot.done():
                self.running += 1
                slot.set_result(None)


class ConcurrencyLimits(dict[str, ConcurrencyLimit]):
    """The limit of each model's requests, by the model's id."""

    def __init__(self, limit: int, waiting_limit: int) -> None:
        super().__init__()
        self._limits = limit, waiting_limit

    def __missing__(self, model: str) -> ConcurrencyLimit:
        created = self[model] = ConcurrencyLimit(*self._limits)
        return created

    @property
    def running(self) -> int:
        """The number of requests that run."""
        return sum(limit.running for limit in self.values())

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(limit.waiting for limit in self.values())

    def update_limits(self, limit: int, waiting_limit: int) -> None:
        """Apply other limits. Requests that run or wait already are not rejected."""
        self._limits = limit, waiting_limit
        for each in self.values():
            each.update_limits(limit, waiting_limit)
