"""The cost that keeps a conversation at the worker that holds most of its blocks."""

from __future__ import annotations

from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.worker_state import WorkerState

MAX_BACKLOG_MS = 500.0
AFFINITY_BONUS_MS = 1e6
"""Discount for each cached block: more than any queue costs."""


class AffinityCost(Cost):
    """Prefer the worker that holds at least half of the prompt, unless more than MAX_BACKLOG_MS of
    prefill is pending there. Other prompts go to the worker with the shortest queue."""

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        backlog = worker.backlog_ms(now)
        overlap = request.overlaps.get(worker.name, 0)
        at_home = 2 * overlap >= len(request.prompt.hashes) and backlog <= MAX_BACKLOG_MS
        stays = -AFFINITY_BONUS_MS * overlap if overlap and at_home else 0.0
        return {"queue": backlog, "stays": stays, "load": worker.step_ms * len(worker.active)}
