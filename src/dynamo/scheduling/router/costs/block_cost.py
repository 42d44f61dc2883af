"""The cost of Dynamo 1.x's KV router: prompt blocks to compute plus active decode blocks."""

from __future__ import annotations

from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState


class BlockCost(Cost):
    """(pending + new prompt tokens) / block size + distinct active blocks of the worker with this
    request added. Only equal costs are ties. Source: ai-dynamo 1.6, kv-router."""

    tie_tolerance = 0.0

    def __init__(self) -> None:
        self._active_blocks: dict[str, dict[int, int]] = {}

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        del now
        size = request.block_tokens
        new = request.prompt.tokens - request.overlaps.get(worker.name, 0) * size
        active = self._active_blocks.get(worker.name, {})
        hashes = request.prompt.hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hashes[middle] in active else (low, middle)
        blocks = -(-request.prompt.tokens // size)
        return {
            "prefill_blocks": (worker.pending_prefill_tokens + new) / size,
            "decode_blocks": float(len(active) + blocks - low),
        }

    def on_placed(self, placed: PlacedRequest) -> None:
        active = self._active_blocks.setdefault(placed.worker.name, {})
        for block in placed.hashes:
            active[block] = active.get(block, 0) + 1

    def on_ended(self, placed: PlacedRequest) -> None:
        name = placed.worker.name
        active = self._active_blocks.get(name, {})
        for block in placed.hashes:
            count = active.get(block, 0) - 1
            if count > 0:
                active[block] = count
            else:
                active.pop(block, None)
        if not active:
            self._active_blocks.pop(name, None)
