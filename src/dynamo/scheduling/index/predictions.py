"""What workers will hold, because prompts were routed there: between the choice and the events, and
in place of events where a worker sends none."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Final

GRACE_S: Final = 0.5
"""After its first token a prompt is believed in so much longer: its events may be on their way."""

MAX_BLOCKS: Final = 400_000

Key = tuple[str, int]
"""A worker, and the last block of a prompt that was routed there."""


class _Routed:
    """One routed prompt. `kept`: believed until `due`, whatever is settled."""

    __slots__ = ("due", "hashes", "kept", "key")

    def __init__(self, due: float, key: Key, hashes: Sequence[int]) -> None:
        self.due = due
        self.key = key
        self.hashes = hashes
        self.kept = False


class _Piece:
    """Blocks that every prompt has all of or none of. `prompts`: worker -> how many have them."""

    __slots__ = ("blocks", "prompts")

    def __init__(self, blocks: Sequence[int], prompts: dict[str, int]) -> None:
        self.blocks = blocks
        self.prompts = prompts

    def common(self, hashes: Sequence[int], start: int) -> int:
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


class Predictions:
    """Routed prompts by worker, as a tree of pieces, cut where prompts part or end: each prompt is
    counted in its pieces and takes itself back. Not thread-safe."""

    def __init__(self, ttl_s: float, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._open: OrderedDict[_Routed, None] = OrderedDict()
        self._keys: dict[Key, list[_Routed]] = {}
        self._closing: deque[_Routed] = deque()
        self._pieces: dict[int, _Piece] = {}
        self._due = inf
        self.blocks = 0

    def routed(self, worker: str, hashes: Sequence[int], now: float) -> None:
        """The worker will hold these blocks; believed for at most `ttl_s`."""
        if now >= self._due:
            self.expire(now)
        if not hashes:
            return
        key = worker, hashes[-1]
        routed = _Routed(now + self._ttl_s, key, hashes)
        self._due = min(self._due, routed.due)
        self._open[routed] = None
        same = self._keys.get(key)
        if same is None:
            self._keys[key] = [routed]
        else:
            same.append(routed)
        self._count(worker, hashes)
        self.blocks += len(hashes)
        while self.blocks > self._max_blocks:
            self._forget_oldest()

    def settled(self, worker: str, hashes: Sequence[int], now: float, *, keep: bool) -> None:
        """A routed prompt has its first token, or failed. `keep`: there are no events to tell, so
        that it is believed on."""
        same = self._keys.get((worker, hashes[-1])) if hashes else None
        if not same:
            return
        if keep:
            same[0].kept = True
            same.append(same.pop(0))
        else:
            self._close(same[0], now)

    def told(self, worker: str, now: float) -> None:
        """From now on events tell of this worker: what was kept in their place goes."""
        for routed in [one for one in self._open if one.kept and one.key[0] == worker]:
            self._close(routed, now)

    def drop(self, worker: str) -> None:
        """The worker is no more."""
        for routed in [one for one in self._open if one.key[0] == worker]:
            self._pop(routed)
            self._take_back(routed)
        for routed in [one for one in self._closing if one.key[0] == worker]:
            self._closing.remove(routed)
            self._take_back(routed)

    def add_to(self, found: dict[str, int], hashes: Sequence[int], now: float) -> None:
        """Raise `found` (worker -> blocks of the longest prefix that it holds) to what is predicted
        where that is more."""
        if now >= self._due:
            self.expire(now)
        pieces = self._pieces
        depth, size = 0, len(hashes)
        while depth < size:
            piece = pieces.get(hashes[depth])
            if piece is None:
                return
            count = piece.common(hashes, depth)
            depth += count
            for worker in piece.prompts:
                if found.get(worker, 0) < depth:
                    found[worker] = depth
            if count < len(piece.blocks):
                return

    def expire(self, now: float) -> None:
        """Forget what is not believed any more."""
        if now < self._due:
            return
        while self._closing and self._closing[0].due <= now:
            self._take_back(self._closing.popleft())
        while self._open and (routed := next(iter(self._open))).due <= now:
            self._pop(routed)
            self._take_back(routed)
        oldest = *islice(self._closing, 1), *islice(self._open, 1)
        self._due = min((one.due for one in oldest), default=inf)

    def _forget_oldest(self) -> None:
        if self._closing:
            routed = self._closing.popleft()
        else:
            routed = next(iter(self._open))
            self._pop(routed)
        self._take_back(routed)

    def _close(self, routed: _Routed, now: float) -> None:
        self._pop(routed)
        routed.due = now + GRACE_S
        self._due = min(self._due, routed.due)
        self._closing.append(routed)

    def _pop(self, routed: _Routed) -> None:
        del self._open[routed]
        same = self._keys[routed.key]
        if len(same) == 1:
            del self._keys[routed.key]
        else:
            same.remove(routed)

    def _count(self, worker: str, hashes: Sequence[int]) -> None:
        """One prompt more."""
        pieces = self._pieces
        depth, size = 0, len(hashes)
        while depth < size:
            piece = pieces.get(hashes[depth])
            if piece is None:
                pieces[hashes[depth]] = _Piece(hashes[depth:], {worker: 1})
                return
            count = piece.common(hashes, depth)
            if count < len(piece.blocks):
                below = piece.blocks[count:]
                pieces[below[0]] = _Piece(below, piece.prompts.copy())
                piece.blocks = piece.blocks[:count]
            piece.prompts[worker] = piece.prompts.get(worker, 0) + 1
            depth += count

    def _take_back(self, routed: _Routed) -> None:
        worker, hashes = routed.key[0], routed.hashes
        pieces = self._pieces
        depth, size = 0, len(hashes)
        self.blocks -= size
        while depth < size:
            block = hashes[depth]
            piece = pieces[block]
            prompts = piece.prompts
            left = prompts[worker] - 1
            if left:
                prompts[worker] = left
            else:
                del prompts[worker]
                if not prompts:
                    del pieces[block]
            depth += len(piece.blocks)
