"""What workers will hold, because prompts were routed there: between the choice and the events, and
in place of events where a worker sends none."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Final

GRACE_S: Final = 0.5
"""After its first token a prompt is believed in so much longer: its events may be on their way."""

MAX_BLOCKS: Final = 400_000


class _Routed:
    """One routed prompt. `kept`: believed until `due`, whatever is settled."""

    __slots__ = ("due", "hashes", "kept", "worker")

    def __init__(self, due: float, worker: str, hashes: Sequence[int]) -> None:
        self.due = due
        self.worker = worker
        self.hashes = hashes
        self.kept = False


Key = tuple[str, int]


class Predictions:
    """Blocks by worker, counted: each prompt adds its own and takes them back. Not thread-safe."""

    def __init__(self, ttl_s: float, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._next = 0
        self._open: OrderedDict[int, _Routed] = OrderedDict()
        self._keys: dict[Key, list[int]] = {}
        self._closing: deque[_Routed] = deque()
        self._roots: dict[int, dict[str, Counter[int]]] = {}
        self.blocks = 0

    def routed(self, worker: str, hashes: Sequence[int], now: float) -> None:
        """The worker will hold these blocks; believed for at most `ttl_s`."""
        self.expire(now)
        if not hashes:
            return
        self._next += 1
        self._open[self._next] = _Routed(now + self._ttl_s, worker, hashes)
        self._keys.setdefault((worker, hashes[-1]), []).append(self._next)
        held = self._roots.setdefault(hashes[0], {}).setdefault(worker, Counter())
        held.update(hashes)
        self.blocks += len(hashes)
        while self.blocks > self._max_blocks:
            self._forget_oldest()

    def settled(self, worker: str, hashes: Sequence[int], now: float, *, keep: bool) -> None:
        """A routed prompt has its first token, or failed. `keep`: there are no events to tell, so
        that it is believed on."""
        numbers = self._keys.get((worker, hashes[-1])) if hashes else None
        if not numbers:
            return
        if keep:
            self._open[numbers[0]].kept = True
            numbers.append(numbers.pop(0))
        else:
            self._close(numbers[0], now)

    def told(self, worker: str, now: float) -> None:
        """From now on events tell of this worker: what was kept in their place goes."""
        kept = [
            number
            for number, routed in self._open.items()
            if routed.kept and routed.worker == worker
        ]
        for number in kept:
            self._close(number, now)

    def drop(self, worker: str) -> None:
        """The worker is no more."""
        for number in [number for number, one in self._open.items() if one.worker == worker]:
            self._take_back(self._pop(number))
        gone = [one for one in self._closing if one.worker == worker]
        for one in gone:
            self._closing.remove(one)
            self._take_back(one)

    def add_to(self, found: dict[str, int], hashes: Sequence[int], now: float) -> None:
        """Raise `found` (worker -> blocks of the longest prefix that it holds) to what is predicted
        where that is more."""
        self.expire(now)
        workers = self._roots.get(hashes[0]) if hashes else None
        if not workers:
            return
        size = len(hashes)
        for worker, held in workers.items():
            depth = found.get(worker, 0)
            if depth < size and hashes[depth] in held:
                found[worker] = _depth(held, hashes, depth + 1)

    def expire(self, now: float) -> None:
        """Forget what is not believed any more."""
        while self._closing and self._closing[0].due <= now:
            self._take_back(self._closing.popleft())
        while self._open:
            number = next(iter(self._open))
            if self._open[number].due > now:
                return
            self._take_back(self._pop(number))

    def _forget_oldest(self) -> None:
        if self._closing:
            self._take_back(self._closing.popleft())
        else:
            self._take_back(self._pop(next(iter(self._open))))

    def _close(self, number: int, now: float) -> None:
        routed = self._pop(number)
        routed.due = now + GRACE_S
        self._closing.append(routed)

    def _pop(self, number: int) -> _Routed:
        routed = self._open.pop(number)
        key = routed.worker, routed.hashes[-1]
        numbers = self._keys[key]
        numbers.remove(number)
        if not numbers:
            del self._keys[key]
        return routed

    def _take_back(self, routed: _Routed) -> None:
        hashes = routed.hashes
        self.blocks -= len(hashes)
        workers = self._roots[hashes[0]]
        held = workers[routed.worker]
        if held[hashes[0]] == 1:
            del workers[routed.worker]
            if not workers:
                del self._roots[hashes[0]]
            return
        for block in reversed(hashes):
            count = held[block]
            if count == 1:
                held.pop(block)  # Counter's own `del` is slow
            else:
                held[block] = count - 1


def _depth(held: Counter[int], hashes: Sequence[int], low: int) -> int:
    """Blocks of the longest prefix in `held`, which holds the first `low`, and with each block
    those above it. Gallops, then halves."""
    size, step = len(hashes), 1
    while low + step <= size and hashes[low + step - 1] in held:
        low += step
        step *= 2
    high = min(low + step, size + 1)
    while high - low > 1:
        middle = (low + high) >> 1
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle
    return low
