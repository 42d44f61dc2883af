"""What workers will hold, because prompts were routed there: between the choice and the events, and
in place of events where a worker sends none."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Final

EVENT_GRACE_S: Final = 0.5
"""After its first token a prompt is believed in so much longer: its events may be on their way."""

MAX_PREDICTED_BLOCKS: Final = 400_000

PromptKey = tuple[str, int]
"""A worker, and the last block of a prompt that was routed there."""


class _RoutedPrompt:
    """One routed prompt. `kept`: believed until `due`, whatever is settled."""

    __slots__ = ("expires_s", "hashes", "key", "until_ttl")

    def __init__(self, due: float, key: PromptKey, hashes: Sequence[int]) -> None:
        self.expires_s = due
        self.key = key
        self.hashes = hashes
        self.until_ttl = False


class _PrefixNode:
    """Blocks that every prompt has all of or none of. `prompts`: worker -> how many have them."""

    __slots__ = ("blocks", "prompt_counts")

    def __init__(self, blocks: Sequence[int], prompts: dict[str, int]) -> None:
        self.blocks = blocks
        self.prompt_counts = prompts

    def match_length(self, hashes: Sequence[int], start: int) -> int:
        """How many of its blocks are those of `hashes` from `start` on; the first is. The chain
        makes halving enough: where two are equal, so are all before."""
        own = self.blocks
        high = min(len(own), len(hashes) - start)
        if own[high - 1] == hashes[start + high - 1]:
            return high
        low = 1
        while high - low > 1:
            middle = (low + high) >> 1
            if own[middle - 1] == hashes[start + middle - 1]:
                low = middle
            else:
                high = middle
        return low


class ApproximateIndex:
    """Routed prompts by worker, as a tree of pieces, cut where prompts part or end: each prompt is
    counted in its pieces and takes itself back. Not thread-safe."""

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
        """The worker will hold these blocks; believed for at most `ttl_s`."""
        if now >= self._next_expiry_s:
            self.expire(now)
        if not hashes:
            return
        key = worker, hashes[-1]
        routed = _RoutedPrompt(now + self._ttl_s, key, hashes)
        self._next_expiry_s = min(self._next_expiry_s, routed.expires_s)
        self._active[routed] = None
        same = self._active_by_key.get(key)
        if same is None:
            self._active_by_key[key] = [routed]
        else:
            same.append(routed)
        self._insert(worker, hashes)
        self.block_count += len(hashes)
        while self.block_count > self._max_blocks:
            self._evict_oldest()

    def settle(self, worker: str, hashes: Sequence[int], now: float, *, until_ttl: bool) -> None:
        """A routed prompt has its first token, or failed. `keep`: there are no events to tell, so
        that it is believed on."""
        same = self._active_by_key.get((worker, hashes[-1])) if hashes else None
        if not same:
            return
        if until_ttl:
            same[0].until_ttl = True
            same.append(same.pop(0))
        else:
            self._start_grace(same[0], now)

    def expire_retained(self, worker: str, now: float) -> None:
        """From now on events tell of this worker: what was kept in their place goes."""
        for routed in [one for one in self._active if one.until_ttl and one.key[0] == worker]:
            self._start_grace(routed, now)

    def remove_worker(self, worker: str) -> None:
        """The worker is no more."""
        for routed in [one for one in self._active if one.key[0] == worker]:
            self._deactivate(routed)
            self._remove(routed)
        for routed in [one for one in self._in_grace if one.key[0] == worker]:
            self._in_grace.remove(routed)
            self._remove(routed)

    def merge_overlaps(self, found: dict[str, int], hashes: Sequence[int], now: float) -> None:
        """Raise `found` (worker -> blocks of the longest prefix that it holds) to what is predicted
        where that is more."""
        if now >= self._next_expiry_s:
            self.expire(now)
        pieces = self._nodes
        depth, size = 0, len(hashes)
        while depth < size:
            piece = pieces.get(hashes[depth])
            if piece is None:
                return
            count = piece.match_length(hashes, depth)
            depth += count
            for worker in piece.prompt_counts:
                if found.get(worker, 0) < depth:
                    found[worker] = depth
            if count < len(piece.blocks):
                return

    def expire(self, now: float) -> None:
        """Forget what is not believed any more."""
        if now < self._next_expiry_s:
            return
        while self._in_grace and self._in_grace[0].expires_s <= now:
            self._remove(self._in_grace.popleft())
        while self._active and (routed := next(iter(self._active))).expires_s <= now:
            self._deactivate(routed)
            self._remove(routed)
        oldest = *islice(self._in_grace, 1), *islice(self._active, 1)
        self._next_expiry_s = min((one.expires_s for one in oldest), default=inf)

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
        same = self._active_by_key[routed.key]
        if len(same) == 1:
            del self._active_by_key[routed.key]
        else:
            same.remove(routed)

    def _insert(self, worker: str, hashes: Sequence[int]) -> None:
        """One prompt more."""
        pieces = self._nodes
        depth, size = 0, len(hashes)
        while depth < size:
            piece = pieces.get(hashes[depth])
            if piece is None:
                pieces[hashes[depth]] = _PrefixNode(hashes[depth:], {worker: 1})
                return
            count = piece.match_length(hashes, depth)
            if count < len(piece.blocks):
                below = piece.blocks[count:]
                pieces[below[0]] = _PrefixNode(below, piece.prompt_counts.copy())
                piece.blocks = piece.blocks[:count]
            piece.prompt_counts[worker] = piece.prompt_counts.get(worker, 0) + 1
            depth += count

    def _remove(self, routed: _RoutedPrompt) -> None:
        worker, hashes = routed.key[0], routed.hashes
        pieces = self._nodes
        depth, size = 0, len(hashes)
        self.block_count -= size
        while depth < size:
            block = hashes[depth]
            piece = pieces[block]
            prompts = piece.prompt_counts
            left = prompts[worker] - 1
            if left:
                prompts[worker] = left
            else:
                del prompts[worker]
                if not prompts:
                    del pieces[block]
            depth += len(piece.blocks)
