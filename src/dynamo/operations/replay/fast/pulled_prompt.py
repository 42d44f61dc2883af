"""A prompt that one simulated worker computes for another, and whose blocks move meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dynamo.inference.disaggregation.peer_prefill import MAX_BLOCKS_PER_PULL
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.request import FastRequest
from dynamo.operations.replay.fast.worker import FastWorker


class PulledPrompt:
    """The prompt of `request`, which waits at the worker `target` with its first `blocks`. The
    worker `source` computes it as the request `prompt`. A pull occupies the links of both for
    `block_s` a block. `on_end` is called at a good end."""

    def __init__(
        self,
        request: FastRequest,
        target: FastWorker,
        prompt: FastRequest,
        source: FastWorker,
        blocks: int,
        block_s: float,
        heap: EventHeap,
        on_end: Callable[[PulledPrompt], None],
    ) -> None:
        self.request, self.target, self.source = request, target, source
        self._prompt = prompt
        self._block_s, self._heap, self._on_end = block_s, heap, on_end
        self._size = target.info.block_tokens
        self._end_block = -(-request.length // self._size)
        self._blocks = self._computed = blocks
        self._needs_blocks = request.output_tokens - request.recomputed > 1
        self._pulling = self._has_token = self._closed = False

    def on_computed(self, now: float) -> None:
        """Pull the blocks that the last step has computed. The last step gives the first token."""
        prompt = self._prompt
        ended = prompt.computed == prompt.length
        computed = self._end_block if ended else prompt.computed // self._size
        self._computed = max(self._computed, computed)
        if ended:
            self._has_token = True
            self.target.on_first_token_arrived(self.request, prompt.cached_tokens, now)
        self._continue(now)

    def close(self, now: float, *, target_died: bool) -> None:
        """End because one of the workers has died. The other one computes the prompt itself, or
        forgets it."""
        self._closed = True
        worker = self.target
        if target_died:
            worker = self.source
            worker.cancel(self._prompt, now)
        elif self.request in worker.arriving:
            worker.compute_arriving(self.request, now)
        self._wake(worker)

    def _continue(self, now: float) -> None:
        if self._pulling:
            return
        request, source, target = self.request, self.source, self.target
        count = min(MAX_BLOCKS_PER_PULL, self._computed - self._blocks) if self._needs_blocks else 0
        if count:
            self._pulling = True
            start_s = max(now, source.link_free_s, target.link_free_s)
            end_s = source.link_free_s = target.link_free_s = start_s + count * self._block_s
            self._heap.call_at(end_s, partial(self._on_pulled, count))
        elif self._has_token:
            self._closed = True
            if self._needs_blocks:
                target.end_arrival(request, now)
            source.release_prompt(self._prompt, now)
            self._on_end(self)
            self._wake(source, target)

    def _wake(self, *workers: FastWorker) -> None:
        self._heap.idle += [worker for worker in workers if not worker.is_busy]

    def _on_pulled(self, count: int) -> None:
        if self._closed:
            return
        self._pulling = False
        self._blocks += count
        self.target.blocks_arrived += count
        tokens = min(self._blocks * self._size, self.request.length)
        self.target.on_blocks_arrived(self.request, tokens)
        self._continue(self._heap.time_s)
