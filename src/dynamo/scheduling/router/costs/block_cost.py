"""The cost of Dynamo 1.x's KV router: blocks to compute plus blocks to decode over."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerState


class BlockCost(Cost):
    """prefill_scale x (tokens queued there + new ones) / block size + distinct blocks that would be
    active there with this request; chance decides between the same only. Source: ai-dynamo 1.6,
    kv-router."""

    tie_tolerance = 0.0

    def __init__(self, prefill_scale: float = 1.0) -> None:
        self._prefill_scale = prefill_scale
        self._active_blocks: WeakKeyDictionary[WorkerState, dict[int, int]] = WeakKeyDictionary()

    def terms(self, request: PendingRequest, book: WorkerState, now: float) -> dict[str, float]:
        del now
        size = request.block_tokens
        new = request.prompt.tokens - request.overlaps.get(book.name, 0) * size
        held = self._active_blocks.get(book, {})
        hashes = request.prompt.hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hashes[middle] in held else (low, middle)
        blocks = -(-request.prompt.tokens // size)
        return {
            "prefill_blocks": self._prefill_scale * (book.pending_prefill_tokens + new) / size,
            "decode_blocks": float(len(held) + blocks - low),
        }

    def on_placed(self, active: PlacedRequest) -> None:
        held = self._active_blocks.setdefault(active.worker, {})
        for block in active.hashes:
            held[block] = held.get(block, 0) + 1

    def on_ended(self, active: PlacedRequest) -> None:
        held = self._active_blocks.get(active.worker)
        if held is None:
            return
        for block in active.hashes:
            count = held.get(block, 0) - 1
            if count > 0:
                held[block] = count
            else:
                held.pop(block, None)
