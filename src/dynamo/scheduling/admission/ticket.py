"""Requests before they have a worker, and how fast they get one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo.core.values import GenerateRequest

GAP_WEIGHT = 0.1
"""Of the newest gap between two turns in their running mean."""


class Ticket:
    """One request before it has a worker. `limit_s`: its first token is wanted so long after
    `arrived_s`; `turn`: resolved when it may go; `barred`: workers that it must not go to."""

    __slots__ = (
        "arrived_s",
        "barred",
        "limit_s",
        "name",
        "predicted_s",
        "prefill_s",
        "request",
        "stop_timer",
        "turn",
    )

    def __init__(self, request: GenerateRequest, now: float, limit_s: float) -> None:
        self.request = request
        self.arrived_s = now
        self.limit_s = limit_s
        self.name = ""
        self.barred: frozenset[str] = frozenset()
        self.prefill_s = 0.0
        self.predicted_s: float | None = None
        self.turn: asyncio.Future[None] | None = None
        self.stop_timer: Callable[[], None] | None = None


class Turns:
    """How fast those that wait get a place: where other frontends want the same places, nothing
    else tells how many of them are for us."""

    __slots__ = ("_gap_s", "_last_s")

    def __init__(self) -> None:
        self._gap_s = 0.0
        self._last_s: float | None = None

    def granted(self, now: float, waiting: int) -> None:
        """One got a place, so many wait on."""
        if self._last_s is not None:
            gap_s = now - self._last_s
            self._gap_s += (gap_s - self._gap_s) * (GAP_WEIGHT if self._gap_s else 1.0)
        self._last_s = now if waiting else None

    def wait_s(self, ahead: int) -> float:
        """Of one that has so many before it."""
        return (ahead + 1) * self._gap_s
