"""A prompt that one simulated worker computes for another, and whose blocks move meanwhile."""

from __future__ import annotations

from functools import partial

from dynamo.inference.disaggregation.peer_prefill import MAX_BLOCKS_PER_PULL
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.request import FastRequest, PromptSink
from dynamo.operations.replay.fast.worker import FastWorker


class PulledPrompt(PromptSink):
    """The prompt of `request`, which waits at the worker `target` with its first `blocks`. The
    worker `source` computes it as the request `prompt`. A pull occupies the links of both for
    `block_s` a block."""

    def __init__(
        self,
        request: FastRequest,
        target: FastWorker,
        prompt: FastRequest,
        source: FastWorker,
        blocks: int,
        block_s: float,
        heap: EventHeap,
    ) -> None:
        self._request, self._target = request, target
        self._prompt, self._source = prompt, source
        self._block_s, self._heap = block_s, heap
        self._size = target.info.block_tokens
        self._end_block = -(-request.prompt_tokens // self._size)
        self._blocks = self._computed = blocks
        self._needs_blocks = request.output_tokens > 1
        self._pulling = False

    def on_computed(self, now: float) -> None:
        """Pull the blocks that the last step has computed. The last step gives the first token."""
        prompt = self._prompt
        ended = prompt.computed == prompt.length
        computed = self._end_block if ended else prompt.computed // self._size
        self._computed = max(self._computed, computed)
        if ended:
            self._target.on_first_token_arrived(self._request, prompt.cached_tokens, now)
        self._continue(now)

    def _continue(self, now: float) -> None:
        if self._pulling:
            return
        request, source, target = self._request, self._source, self._target
        count = min(MAX_BLOCKS_PER_PULL, self._computed - self._blocks) if self._needs_blocks else 0
        if count:
            self._pulling = True
            start_s = max(now, source.link_free_s, target.link_free_s)
            end_s = source.link_free_s = target.link_free_s = start_s + count * self._block_s
            self._heap.call_at(end_s, partial(self._on_pulled, count))
        elif request.first_token_s:
            if self._needs_blocks:
                target.end_arrival(request, now)
            source.release_prompt(self._prompt, now)
            self._heap.idle += [worker for worker in (source, target) if not worker.is_busy]

    def _on_pulled(self, count: int) -> None:
        self._pulling = False
        self._blocks += count
        self._target.blocks_arrived += count
        tokens = min(self._blocks * self._size, self._request.prompt_tokens)
        self._target.on_blocks_arrived(self._request, tokens)
        self._continue(self._heap.time_s)
