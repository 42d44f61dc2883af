"""Predicted cache contents: blocks of prompts that were routed to a worker.

Predictions bridge the time between routing and the KV events, and replace missing events.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Final

from dynamo.scheduling.index.block_runs import match_length

EVENT_GRACE_S: Final = 0.5
"""A prediction remains for this time after the first token: its KV events may be delayed."""

MAX_PREDICTED_BLOCKS: Final = 400_000

PromptKey = tuple[str, int]
"""A worker and the last block of a prompt that was routed to it."""


@dataclass(eq=False, slots=True)
class _RoutedPrompt:
    """A routed prompt. `until_ttl`: its first token does not end the prediction."""

    expires_s: float
    key: PromptKey
    hashes: Sequence[int]
    until_ttl: bool = False


@dataclass(eq=False, slots=True)
class _PrefixNode:
    """A chain of blocks that every prompt through this node contains, with prompts by worker."""

    blocks: Sequence[int]
    prompt_counts: dict[str, int]


class ApproximateIndex:
    """Routed prompts as a prefix tree, with a node for each stretch where no prompt branches or
    ends. Every prompt is counted in its nodes and later removed from them. Not thread-safe."""

    def __init__(self, ttl_s: float, *, max_blocks: int = MAX_PREDICTED_BLOCKS) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._active: OrderedDict[_RoutedPrompt, None] = OrderedDict()
        self._active_by_key: dict[PromptKey, list[_RoutedPrompt]] = {}
        self._in_grace: deque[_RoutedPrompt] = deque()
        self._nodes: dict[int, _PrefixNode] = {}
        self._next_expiry_s = inf
        self.block_count = 0

    def add(self, worker: str, hashes: Sequence[int], now: float) -> None:
        """Predict that the worker will hold these blocks, for at most `ttl_s`. Keeps `hashes`."""
        if now >= self._next_expiry_s:
            self.expire(now)
        if not hashes:
            return
        key = worker, hashes[-1]
        routed = _RoutedPrompt(now + self._ttl_s, key, hashes)
        self._next_expiry_s = min(self._next_expiry_s, routed.expires_s)
        self._active[routed] = None
        routed_prompts = self._active_by_key.get(key)
        if routed_prompts is None:
            self._active_by_key[key] = [routed]
        else:
            routed_prompts.append(routed)
        self._insert(worker, hashes)
        self.block_count += len(hashes)
        while self.block_count > self._max_blocks:
            self._evict_oldest()

    def end_prediction(
        self, worker: str, hashes: Sequence[int], now: float, *, until_ttl: bool
    ) -> None:
        """End a prediction after the first token or a failure. With `until_ttl`, where no events
        come, it remains until its time to live ends."""
        routed_prompts = self._active_by_key.get((worker, hashes[-1])) if hashes else None
        if not routed_prompts:
            return
        if until_ttl:
            routed_prompts[0].until_ttl = True
            routed_prompts.append(routed_prompts.pop(0))
        else:
            self._start_grace(routed_prompts[0], now)

    def end_until_ttl(self, worker: str, now: float) -> None:
        """End the predictions that replaced the missing events of this worker."""
        for routed in [
            prompt for prompt in self._active if prompt.until_ttl and prompt.key[0] == worker
        ]:
            self._start_grace(routed, now)

    def remove_worker(self, worker: str) -> None:
        """Remove all predictions for the worker."""
        for routed in [prompt for prompt in self._active if prompt.key[0] == worker]:
            self._deactivate(routed)
            self._remove(routed)
        for routed in [prompt for prompt in self._in_grace if prompt.key[0] == worker]:
            self._in_grace.remove(routed)
            self._remove(routed)

    def merge_overlaps(self, overlaps: dict[str, int], hashes: Sequence[int], now: float) -> None:
        """Raise `overlaps` (worker -> blocks of the longest prefix) to the predicted ones."""
        if now >= self._next_expiry_s:
            self.expire(now)
        nodes = self._nodes
        depth, size = 0, len(hashes)
        while depth < size:
            node = nodes.get(hashes[depth])
            if node is None:
                return
            count = match_length(node.blocks, 0, hashes, depth)
            depth += count
            for worker in node.prompt_counts:
                if overlaps.get(worker, 0) < depth:
                    overlaps[worker] = depth
            if count < len(node.blocks):
                return

    def expire(self, now: float) -> None:
        """Remove expired predictions."""
        if now < self._next_expiry_s:
            return
        while self._in_grace and self._in_grace[0].expires_s <= now:
            self._remove(self._in_grace.popleft())
        while self._active and (routed := next(iter(self._active))).expires_s <= now:
            self._deactivate(routed)
            self._remove(routed)
        oldest = *islice(self._in_grace, 1), *islice(self._active, 1)
        self._next_expiry_s = min((prompt.expires_s for prompt in oldest), default=inf)

    def _evict_oldest(self) -> None:
        if self._in_grace:
            routed = self._in_grace.popleft()
        else:
            routed = next(iter(self._active))
            self._deactivate(routed)
        self._remove(routed)

    def _start_grace(self, routed: _RoutedPrompt, now: float) -> None:
        self._deactivate(routed)
        routed.expires_s = now + EVENT_GRACE_S
        self._next_expiry_s = min(self._next_expiry_s, routed.expires_s)
        self._in_grace.append(routed)

    def _deactivate(self, routed: _RoutedPrompt) -> None:
        del self._active[routed]
        routed_prompts = self._active_by_key[routed.key]
        if len(routed_prompts) == 1:
            del self._active_by_key[routed.key]
        else:
            routed_prompts.remove(routed)

    def _insert(self, worker: str, hashes: Sequence[int]) -> None:
        nodes = self._nodes
        depth, size = 0, len(hashes)
        while depth < size:
            node = nodes.get(hashes[depth])
            if node is None:
                nodes[hashes[depth]] = _PrefixNode(hashes[depth:], {worker: 1})
                return
            count = match_length(node.blocks, 0, hashes, depth)
            if count < len(node.blocks):
                below = node.blocks[count:]
                nodes[below[0]] = _PrefixNode(below, node.prompt_counts.copy())
                node.blocks = node.blocks[:count]
            node.prompt_counts[worker] = node.prompt_counts.get(worker, 0) + 1
            depth += count

    def _remove(self, routed: _RoutedPrompt) -> None:
        worker, hashes = routed.key[0], routed.hashes
        nodes = self._nodes
        depth, size = 0, len(hashes)
        self.block_count -= size
        while depth < size:
            block = hashes[depth]
            node = nodes[block]
            counts = node.prompt_counts
            remaining = counts[worker] - 1
            if remaining:
                counts[worker] = remaining
            else:
                del counts[worker]
                if not counts:
                    del nodes[block]
            depth += len(node.blocks)
