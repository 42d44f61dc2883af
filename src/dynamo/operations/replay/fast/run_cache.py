"""The prefix cache of a simulated worker, by runs of blocks instead of single ones.

A unit is the blocks that one hash id of a trace stands for. A run is a chain of units without a
branch. Runs are cached, referenced and evicted as `BlockPool` does it with blocks: a run is split
where prompts differ, and evicted from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dynamo.inference.block_pool import KvEventBuffer
from dynamo.scheduling.workers.prompt import common_prefix_blocks

EVICTION_WINDOW = 4096
"""The number of victims over which the lifetime of runs is averaged, as in `ReuseAware`."""

Held = tuple["CachedRun", int]
"""A run that a sequence references, and how many units it had then: the rest may be split off."""


class CachedRun:
    """A run of units with these `keys`, of which `blocks` are cached of `whole`.

    `references`: the sequences that use it. `hits`: those that found it. `rest`: the run that was
    split off its end. `queue`: where it waits for its eviction without references. A run without
    keys is found by nobody.
    """

    __slots__ = ("blocks", "hits", "keys", "last_used", "queue", "references", "rest", "whole")

    def __init__(self, keys: list[int], blocks: int) -> None:
        self.keys = keys
        self.blocks = self.whole = blocks
        self.references = 1
        self.hits = self.last_used = 0
        self.rest: CachedRun | None = None
        self.queue: OrderedDict[CachedRun, None] | None = None


class RunCache:
    """The blocks of one worker, in units of `unit` blocks. `reuse_aware`: runs that several
    sequences have used live longer. `events` gets the keys that are cached and evicted, if any."""

    def __init__(
        self,
        blocks: int,
        unit: int,
        *,
        reuse_aware: bool,
        enabled: bool,
        events: KvEventBuffer | None,
    ) -> None:
        self.free = blocks
        self.unit = unit
        self.evictable = self.evictions = 0
        self.enabled = enabled
        self._reuse_aware = reuse_aware
        self._events = events
        self._by_first_key: dict[int, CachedRun] = {}
        self._unshared: OrderedDict[CachedRun, None] = OrderedDict()
        self._shared: OrderedDict[CachedRun, None] = OrderedDict()
        self._released = self._victims = 0
        self._lifetime = 0.0
        self._last_answer: CachedRun | None = None

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return self.free + self.evictable

    def match(self, keys: Sequence[int], at: int, end: int) -> list[Held]:
        """Return the cached runs of a prompt from its unit `at` on, up to the unit `end`, each with
        the units of it that the prompt has. No state changes."""
        matched: list[Held] = []
        get = self._by_first_key.get
        while at < end:
            run = get(keys[at])
            if run is None:
                break
            units = size = len(run.keys)
            if at + size > end or run.keys[-1] != keys[at + size - 1]:
                units = common_prefix_blocks(run.keys, keys[at : min(end, at + size)])
            matched.append((run, units))
            if units < size or run.blocks < run.whole:
                break
            at += units
        return matched

    def count(self, matched: Sequence[Held]) -> tuple[int, int]:
        """Return the blocks of matched runs, and how many of them nobody uses."""
        blocks = unused = 0
        for run, units in matched:
            part = min(run.blocks, units * self.unit)
            blocks += part
            unused += 0 if run.references else part
        return blocks, unused

    def take(self, matched: Sequence[Held]) -> list[Held]:
        """Add a reference to each of these runs, and return what is held. The units that a prompt
        does not share are split off."""
        held = []
        for run, units in matched:
            part = run if units == len(run.keys) else self._split(run, units)
            if not part.references and part.queue is not None:
                self.evictable -= part.blocks
                del part.queue[part]
                part.queue = None
            part.references += 1
            part.hits += 1
            held.append((part, units))
        return held

    def allocate(self, count: int) -> None:
        """Take `count` blocks, which are available."""
        self.free -= count
        while self.free < 0:
            self._evict(-self.free)

    def register(
        self, held: list[Held], keys: Sequence[int], at: int, end: int, blocks: int
    ) -> None:
        """Cache the units `at` to `end` of a prompt, and what was evicted of the last run that it
        holds. `blocks` were allocated for them; those that are cached already are given back."""
        if held:
            blocks -= self._refill(held[-1][0], blocks)
        # Units that another request has cached meanwhile.
        if self.enabled and (matched := self.match(keys, at, end)):
            known, _ = self.count(matched)
            self.free += known
            blocks -= known
            held += self.take(matched)
            at += sum([units for _, units in matched])
            blocks -= self._refill(held[-1][0], blocks)
        if at == end:
            self.free += blocks
            return
        new = list(keys[at:end])
        if self.enabled and self._events is not None:
            parent = keys[at - 1] if at else 0
            for key in new:
                self._events.add_stored(parent, key)
                parent = key
        # New units extend the last run if only this request holds it, up to its end.
        if held:
            last, units = held[-1]
            if last.references == 1 and not (last.hits or last.rest) and units == len(last.keys):
                last.keys += new
                last.blocks += blocks
                last.whole += blocks
                held[-1] = last, units + len(new)
                return
        run = CachedRun(new, blocks)
        held.append((run, len(new)))
        if self.enabled:
            self._by_first_key[new[0]] = run

    def _refill(self, run: CachedRun, blocks: int) -> int:
        """Give up to `blocks` back to a run whose end was evicted, and return how many."""
        missing = min(blocks, run.whole - run.blocks)
        run.blocks += missing
        return missing

    def release(self, held: Sequence[Held], answer: int, unused: int) -> None:
        """Drop a reference to each of the runs of a chain, the last one first. `answer`: full
        blocks that no other sequence finds. `unused`: other blocks, which are free now."""
        self.free += unused
        if answer and self.enabled:
            self._queue_answer(answer)
        else:
            self.free += answer
        for run, units in reversed(held):
            parts, left = [run], units - len(run.keys)
            while left > 0 and (rest := parts[-1].rest) is not None:
                parts.append(rest)
                left -= len(rest.keys)
            for part in reversed(parts):
                self._release(part)

    def _release(self, run: CachedRun) -> None:
        run.references -= 1
        if not run.references:
            if self.enabled:
                self._queue(run)
            else:
                self.free += run.blocks

    def _queue_answer(self, blocks: int) -> None:
        """Queue blocks that no sequence finds, as one run with such blocks just before them."""
        last = self._last_answer
        if last is not None and last.blocks and last.last_used == self._released:
            self._released += blocks
            last.last_used = self._released
            last.blocks += blocks
            self.evictable += blocks
        else:
            self._last_answer = run = CachedRun([], blocks)
            self._queue(run)

    def _queue(self, run: CachedRun) -> None:
        self._released += run.blocks
        run.last_used = self._released
        run.queue = self._shared if self._reuse_aware and run.hits else self._unshared
        run.queue[run] = None
        self.evictable += run.blocks

    def _split(self, run: CachedRun, units: int) -> CachedRun:
        """Split a run before the unit of that number, and return the first part. An unused run
        stays in its queue as the second part, a used one is held as the first part."""
        blocks, keys = units * self.unit, run.keys
        part = CachedRun(keys[:units], min(blocks, run.blocks))
        part.whole = blocks
        rest = run
        if run.references:
            part, rest = run, part
            rest.keys, rest.blocks = keys[units:], run.blocks - min(blocks, run.blocks)
            rest.whole = run.whole - blocks
            rest.references, rest.rest, run.rest = run.references, run.rest, rest
            run.keys, run.blocks, run.whole = keys[:units], min(blocks, run.blocks), blocks
        else:
            part.references = 0
            self.evictable -= part.blocks
            rest.keys, rest.blocks = keys[units:], run.blocks - part.blocks
            rest.whole -= blocks
            rest.last_used -= part.blocks
        rest.hits, part.hits = run.hits, run.hits
        self._by_first_key[part.keys[0]] = part
        self._by_first_key[rest.keys[0]] = rest
        return part

    def _evict(self, count: int) -> None:
        """Free up to `count` blocks of the run that is evicted next."""
        queue, shared = self._unshared, self._shared
        if shared:
            oldest = next(iter(shared))
            if not queue or _tail_age(oldest) + self._lifetime < _tail_age(next(iter(queue))):
                queue = shared
        run = next(iter(queue))
        blocks = min(count, run.blocks)
        age = self._released - _tail_age(run)
        self._victims = min(self._victims + blocks, EVICTION_WINDOW)
        self._lifetime += (age - self._lifetime) * min(1.0, blocks / self._victims)
        run.blocks -= blocks
        self.free += blocks
        self.evictable -= blocks
        self.evictions += blocks
        if keys := run.keys:
            units = -(-run.blocks // self.unit)
            if units < len(keys):
                self._drop(keys[units:])
                if not units:
                    del self._by_first_key[keys[0]]
                del keys[units:]
                run.whole = units * self.unit
        if not run.blocks:
            del queue[run]

    def _drop(self, keys: Sequence[int]) -> None:
        """Take note that units of these keys are not cached any more."""
        if self._events is not None:
            for key in reversed(keys):
                self._events.add_removed(key)


def _tail_age(run: CachedRun) -> int:
    """Return when the last block of a run was used, which was released before the others."""
    return run.last_used - run.blocks + 1
