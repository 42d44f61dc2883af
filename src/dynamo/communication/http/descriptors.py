"""The limit of descriptors, and the share of it that clients' connections may take."""

from __future__ import annotations

import asyncio
import os
import resource
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from heapq import nsmallest
from operator import itemgetter
from typing import Literal, Protocol

RESERVED_DESCRIPTORS = 64
"""Descriptors that clients cannot take, for planes, files and status ports."""
RESERVED_FROM_STATUS = RESERVED_DESCRIPTORS // 2
"""The same for clients of the status port, so that it answers when the HTTP port is full."""
MAX_REFUSED = RESERVED_DESCRIPTORS // 4
"""Connections beyond the limit that stay open until their clients have read a 503."""
MIN_IDLE_S = 0.1
NEWEST_IDLE = 16
"""So many idle connections stay open for `MIN_IDLE_S`: their first request may be on its way."""
COUNT_INTERVAL_S = 1.0
MAX_CANDIDATES = 1024

Room = Literal["free", "full", "exhausted"]
"""A new connection has a place, or room for a 503 only, or not even that."""


class EvictableConnection(Protocol):
    """A connection that can be closed for a new one."""

    @property
    def idle_since(self) -> float:
        """Time since which no complete request is here; inf while one is received or answered."""

    def close(self) -> None:
        """Close the connection."""


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class DescriptorBudget:
    """Makes room for new connections of one HTTP server by closing those that are idle longest.

    The kernel gives each connection the lowest free descriptor. While this number is low, there is
    room and nothing is counted.
    """

    def __init__(self, reserved: int = RESERVED_DESCRIPTORS) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = max(soft - reserved, soft // 2)
        self._was_full = False
        self._other_descriptors = 0
        self._counted_at = self._next_search_at = float("-inf")
        self._candidates: deque[tuple[float, EvictableConnection]] = deque()

    def make_room(
        self,
        transport: asyncio.BaseTransport,
        connections: Collection[EvictableConnection],
        now: float,
    ) -> Room:
        """Close an idle connection if the new one, of `transport`, exceeds the limit. All open
        ones, with the new one, are in `connections`. `now` is in the time of `idle_since`."""
        if not self._was_full:
            new_socket = transport.get_extra_info("socket")
            if new_socket is None or new_socket.fileno() < self._limit:
                return "free"
            self._was_full = True  # from now on, high descriptors and gaps below may coexist
        self._count_others(len(connections), now)
        excess = len(connections) + self._other_descriptors - self._limit
        if excess <= 0:
            return "free"
        if (connection := self._pop_oldest_idle(connections, now)) is not None:
            connection.close()
            return "free"
        return "full" if excess <= MAX_REFUSED else "exhausted"

    def _count_others(self, connections: int, now: float) -> None:
        if now - self._counted_at >= COUNT_INTERVAL_S:
            self._counted_at = now
            self._other_descriptors = count_open_descriptors() - connections

    def _pop_oldest_idle(
        self, connections: Collection[EvictableConnection], now: float
    ) -> EvictableConnection | None:
        while True:
            while self._candidates:
                since, connection = self._candidates.popleft()
                if connection.idle_since == since:
                    return connection
            if now < self._next_search_at:
                return None
            self._find_candidates(connections, now)
            if len(self._candidates) * 8 < len(connections):  # searching again soon is too costly
                self._next_search_at = now + MIN_IDLE_S

    def _find_candidates(self, connections: Collection[EvictableConnection], now: float) -> None:
        """Collect the idle connections, oldest first, without the newest."""
        pairs = ((connection.idle_since, connection) for connection in connections)
        idle = [pair for pair in pairs if pair[0] <= now]
        old = sum(since <= now - MIN_IDLE_S for since, _ in idle)
        count = min(max(old, len(idle) - NEWEST_IDLE), MAX_CANDIDATES)
        self._candidates.extend(nsmallest(count, idle, key=itemgetter(0)))


def count_open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    count = os.stat("/proc/self/fd").st_size  # noqa: PTH116 - since Linux 6.2, without a listing
    return count or len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - names are enough
