"""The cost that keeps a conversation at a worker that holds at least half of its blocks."""

from __future__ import annotations

from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.workers.worker import WorkerState

MAX_BACKLOG_MS = 500.0
AFFINITY_BONUS_MS = 1e6
"""Discount for each cached block: more than any queue costs."""


class AffinityCost(Cost):
    """Prefer the worker with the most blocks of the prompt among those that hold at least half of
    them and have at most MAX_BACKLOG_MS of pending prefill. Without such a worker, the lowest
    pending prefill plus step time times requests wins."""

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        backlog = worker.backlog_ms(now)
        overlap = request.overlaps.get(worker.name, 0)
        is_preferred = 2 * overlap >= len(request.prompt.hashes) and backlog <= MAX_BACKLOG_MS
        affinity = -AFFINITY_BONUS_MS * overlap if overlap and is_preferred else 0.0
        return {"queue": backlog, "affinity": affinity, "load": worker.step_ms * len(worker.active)}
