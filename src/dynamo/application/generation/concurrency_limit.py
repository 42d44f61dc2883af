"""How many requests are worked on at once; the rest waits, or is turned away."""

from __future__ import annotations

import asyncio
from collections import deque

from dynamo.core.errors import Overloaded


class ConcurrencyLimit:
    """`limit` requests run, `waiting_limit` wait in order; the next is refused at once."""

    def __init__(self, limit: int, waiting_limit: int) -> None:
        self.limit = limit
        self.waiting_limit = waiting_limit
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return len(self._waiting)

    def try_acquire(self) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if self._waiting or self.running >= self.limit:
            return False
        self.running += 1
        return True

    async def acquire(self) -> None:
        """Take a place, waiting if need be. Raises `Overloaded`."""
        if self.try_acquire():
            return
        if len(self._waiting) >= self.waiting_limit:
            raise Overloaded(
                f"{self.running} requests run and {len(self._waiting)} wait already",
                hint="server.max_concurrent_requests and server.max_waiting_requests are the "
                "limits",
                retry_after_s=1,
            )
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release()
            elif place in self._waiting:  # not passed over since by one that left
                self._waiting.remove(place)
            raise

    def update_limits(self, limit: int, waiting_limit: int) -> None:
        """Other limits from now on. What runs goes on; what waits is not refused afterwards."""
        self.limit, self.waiting_limit = limit, waiting_limit
        self._admit_waiting()

    def release(self) -> None:
        """Give the place to whoever waits longest."""
        self.running -= 1
        if self._waiting:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self.running < self.limit:
            place = self._waiting.popleft()
            if not place.done():
                self.running += 1
                place.set_result(None)
