"""Requests before they have a worker, and how fast they get one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo.core.values import GenerateRequest

DispatchKey = tuple[str, int]
"""The key of one generation from admission to its first attempt: request id and choice."""

GAP_WEIGHT = 0.1
"""Of the newest gap between two turns in their running mean."""


class QueuedRequest:
    """One request before it has a worker. `limit_s`: its first token is wanted so long after
    `arrived_s`; `turn`: resolved when it may go; `barred`: workers that it must not go to."""

    __slots__ = (
        "arrived_s",
        "cancel_timer",
        "excluded_workers",
        "key",
        "predicted_first_token_s",
        "predicted_prefill_s",
        "queue_id",
        "request",
        "slot_ready",
        "ttft_limit_s",
    )

    def __init__(self, request: GenerateRequest, now: float, limit_s: float) -> None:
        self.request = request
        self.key: DispatchKey = (request.request_id, request.choice)
        self.arrived_s = now
        self.ttft_limit_s = limit_s
        self.queue_id = ""
        self.excluded_workers: frozenset[str] = frozenset()
        self.predicted_prefill_s = 0.0
        self.predicted_first_token_s: float | None = None
        self.slot_ready: asyncio.Future[None] | None = None
        self.cancel_timer: Callable[[], None] | None = None


class DequeueRate:
    """How fast those that wait get a place: where other frontends want the same places, nothing
    else tells how many of them are for us."""

    __slots__ = ("_last_dequeue_s", "_mean_gap_s")

    def __init__(self) -> None:
        self._mean_gap_s = 0.0
        self._last_dequeue_s: float | None = None

    def record_dequeue(self, now: float, waiting: int) -> None:
        """One got a place, so many wait on."""
        if self._last_dequeue_s is not None:
            gap_s = now - self._last_dequeue_s
            self._mean_gap_s += (gap_s - self._mean_gap_s) * (
                GAP_WEIGHT if self._mean_gap_s else 1.0
            )
        self._last_dequeue_s = now if waiting else None

    def predict_wait_s(self, ahead: int) -> float:
        """Of one that has so many before it."""
        return (ahead + 1) * self._mean_gap_s
