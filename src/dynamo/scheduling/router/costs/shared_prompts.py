"""Prompt tokens that several answers of a worker share, as its memory holds them once."""

from __future__ import annotations

from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState


class SharedPrompts:
    """Counts the blocks of the prompts whose answers a worker writes or will write. Sets
    `WorkerState.shared_tokens`."""

    def __init__(self) -> None:
        self._answers_by_block: dict[WorkerState, dict[int, int]] = {}

    def add(self, placed: PlacedRequest) -> None:
        """Add the prompt of a request at the worker that decodes it."""
        worker = placed.decode_worker or placed.worker
        answers, shared = self._answers_by_block.setdefault(worker, {}), 0
        for block in placed.hashes:
            before = answers.get(block, 0)
            answers[block] = before + 1
            shared += before > 0
        worker.shared_tokens += shared * _block_tokens(worker)

    def remove(self, placed: PlacedRequest) -> None:
        """Remove the prompt of a request. A request that was never added is ignored."""
        worker = placed.decode_worker or placed.worker
        answers, shared = self._answers_by_block.get(worker), 0
        if answers is None:
            return
        for block in placed.hashes:
            after = answers.get(block, 0) - 1
            if after > 0:
                answers[block] = after
                shared += 1
            else:
                answers.pop(block, None)
        worker.shared_tokens -= shared * _block_tokens(worker)
        if not answers:
            del self._answers_by_block[worker]
            worker.shared_tokens = 0


def _block_tokens(worker: WorkerState) -> int:
    return worker.engine_info.block_tokens if worker.engine_info else 0
