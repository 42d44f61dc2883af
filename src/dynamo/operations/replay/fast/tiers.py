"""The memory tiers below the blocks of one worker of a fast replay.

`FastTiers` does with units of the trace what `KvTiers` and `Offload` do with blocks. Units go down
ahead of their eviction, or with their second use. Units that a prompt lacks are loaded where that
is predicted to be quicker than computing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from dynamo.core.clock import Clock
from dynamo.core.load_choice import count_useful_runs
from dynamo.core.timing.learner import TimingLearner
from dynamo.core.timing.model import Counts
from dynamo.core.values import EngineInfo, KvEvent, TierLoad
from dynamo.inference.tiers.offload import (
    AHEAD_SHARE,
    GROWTH_BLOCKS,
    MAX_LOAD_FACTOR,
    MIN_AHEAD,
    MIN_PREEMPTIBLE,
    PEAK_FACTOR,
    PEAK_TURNOVERS,
)
from dynamo.operations.replay.fast.request import FastRequest
from dynamo.operations.replay.fast.run_cache import CachedRun
from dynamo.operations.replay.fast.tier_units import TierUnits, Unit, UnitWriter
from dynamo.operations.replay.fast.tiered_cache import NO_KEY, TieredRunCache


class UnitLoad(NamedTuple):
    """Blocks of a prompt that lie in one tier, from `first` up to `end`, and their units."""

    writer: UnitWriter
    keys: list[int]
    first: int
    end: int


class LoadListener(ABC):
    """Gets what tiers load for a worker."""

    @abstractmethod
    def on_loaded(self, request: FastRequest, tokens: int, *, counts: bool) -> bool:
        """Take note that the first `tokens` of an arriving prompt are here, which count as cached
        if `counts`. False: the request is gone."""

    @abstractmethod
    def on_load_ended(self, request: FastRequest, now: float) -> None:
        """Take note that tiers load no more for a request."""

    @abstractmethod
    def on_stored(self) -> None:
        """Take note that a tier holds other units."""


class FastTiers:
    """The tiers of a worker, fastest first, below its `cache`. `listener` is the worker."""

    def __init__(
        self,
        tiers: Sequence[TierUnits],
        cache: TieredRunCache,
        info: EngineInfo,
        block_bytes: int,
        clock: Clock,
        listener: LoadListener,
    ) -> None:
        self._cache, self._clock, self._listener = cache, clock, listener
        self._block_tokens, self._block_bytes = info.block_tokens, block_bytes
        self._num_blocks = info.num_blocks
        self._min_ahead = max(MIN_AHEAD, info.num_blocks // AHEAD_SHARE)
        self.writers = [UnitWriter(each, clock, block_bytes, listener.on_stored) for each in tiers]
        self._hosts = [each for each in self.writers if each.tier.tier.name == "host"]
        self._lower = [each for each in self.writers if each.tier.tier.name != "host"]
        self._learner = TimingLearner()
        self._loading: dict[int, FastRequest] = {}
        self._stored_unnamed: dict[CachedRun, int] = {}
        self._peak, self._evictions = 0.0, 0
        self._registered, self._evictable = -info.num_blocks, info.num_blocks
        self._parked = (-1, 0)
        cache.on_evicted = self._on_evicted

    def take_events(self) -> list[KvEvent]:
        """Return the changes of all tiers since the last call."""
        return [event for each in self.writers for event in each.tier.events.drain()]

    def report_load(self) -> tuple[TierLoad, ...]:
        """Return the state of the tiers, as the router sees it: a unit is a block."""
        unit_s = self._cache.unit * self._block_bytes
        return tuple(
            TierLoad(
                each.tier.tier.name,
                _round(unit_s / each.tier.tier.bytes_per_s),
                _round(each.tier.loads.predict_s(0)),
            )
            for each in self.writers
        )

    @property
    def timing(self) -> tuple[float, ...]:
        """The coefficients of the worker's timing as learnt."""
        return self._learner.coefficients

    def is_loading(self, request: FastRequest) -> bool:
        """Whether another request loads the next unit that a waiting one lacks."""
        if not self._loading:
            return False
        cache = self._cache
        units = min(request.units, -(-((request.length - 1) // self._block_tokens) // cache.unit))
        at = cache.count(cache.match(request.keys, 0, units))[0] // cache.unit
        return at < units and request.keys[at] in self._loading

    def find_loads(
        self, request: FastRequest, have: int, full: int, backlog_tokens: int
    ) -> Sequence[UnitLoad]:
        """Return the blocks after the first `have` whose load saves time against computing. If they
        are all of the `full` ones, no other worker computes the prompt."""
        self._peak = max(self._peak, full - have)
        unit, keys, loads = self._cache.unit, request.keys, list[UnitLoad]()
        last, end = min(full, request.named_blocks), have
        for index in range(have // unit, -(-last // unit)):
            key = keys[index]
            writer = next((each for each in self.writers if key in each.tier.units), None)
            if writer is None:
                break
            first, end = end, min((index + 1) * unit, last)
            if loads and loads[-1].writer is writer:
                loads[-1].keys.append(key)
                loads[-1] = loads[-1]._replace(end=end)
            else:
                loads.append(UnitLoad(writer, [key], first, end))
        if not loads:
            return ()
        load_s, ready = 0.0, []
        for load in loads:
            blocks = load.end - load.first
            load_s += load.writer.tier.loads.predict_s(blocks * self._block_bytes)
            ready.append((blocks, load_s))
        token_s = self._learner.token_s
        times = self._block_tokens * token_s, backlog_tokens * token_s
        loads = loads[: count_useful_runs(ready, *times)]
        if loads and loads[-1].end == full:
            request.source = ""
        return loads

    def load(self, request: FastRequest, loads: Sequence[UnitLoad], *, counts: bool) -> None:
        """Load blocks of an arriving request one run after the other."""
        if not request.source:
            self.on_hits(request, request.run_blocks)
        for load in loads:
            for key in load.keys:
                self._loading.setdefault(key, request)
        self._load_next(request, deque(loads), counts=counts)

    def on_reused(self, units: Iterable[Unit]) -> None:
        """Let units that a request has found go down to the tiers below host memory."""
        for writer in self._lower:
            writer.add(units)

    def on_hits(self, request: FastRequest, blocks: int) -> None:
        """Take note that a request has found so many blocks of its prompt."""
        if self._lower:
            unit = self._cache.unit
            self.on_reused([(key, unit) for key in request.keys[: blocks // unit]])

    def on_planned(self, running: dict[FastRequest, None], *, only_decodes: bool = False) -> None:
        """Choose the units that go down next, after a step was planned. If it `only_decodes`, there
        are others only after a release."""
        if only_decodes and not self._cache.released:
            return
        self._cache.released = False
        limit_s = MAX_LOAD_FACTOR * self._block_tokens * self._learner.token_s
        for writer in self._hosts:
            if self._block_bytes / writer.tier.tier.bytes_per_s < limit_s:
                self._store_victims(writer, running)
                self._store_preempted(writer, running)

    def on_step(self, counts: Counts, step_s: float) -> None:
        """Learn the time of a step."""
        self._learner.observe(counts, step_s)

    def _load_next(self, request: FastRequest, loads: deque[UnitLoad], *, counts: bool) -> None:
        load = loads.popleft() if loads else None
        if load is None or any(key not in load.writer.tier.units for key in load.keys):
            for key in [key for key, other in self._loading.items() if other is request]:
                del self._loading[key]
            self._listener.on_load_ended(request, self._clock.now())
            return
        tier = load.writer.tier
        tier.begin_load(load.keys)
        began_s = self._clock.now()
        end_s = tier.loads.reserve((load.end - load.first) * self._block_bytes)
        on_end = partial(self._on_load, request, load, loads, began_s, counts=counts)
        self._clock.call_at(end_s, on_end)

    def _on_load(
        self,
        request: FastRequest,
        load: UnitLoad,
        loads: deque[UnitLoad],
        began_s: float,
        *,
        counts: bool,
    ) -> None:
        tier, counters = load.writer.tier, load.writer.counters
        units = [(key, tier.units[key]) for key in load.keys]
        tier.end_load(load.keys)
        counters.loaded_blocks += load.end - load.first
        counters.load_s += self._clock.now() - began_s
        if not self._listener.on_loaded(request, load.end * self._block_tokens, counts=counts):
            loads.clear()
        elif not request.source:  # else no step here computes a prompt with these units
            self.on_reused(units)
        self._load_next(request, loads, counts=counts)

    def _store_victims(self, writer: UnitWriter, running: dict[FastRequest, None]) -> None:
        """Store the units that are evicted next."""
        cache, total = self._cache, self._num_blocks
        turnover = (cache.evictions - self._evictions) / total
        self._evictions = cache.evictions
        self._peak *= max(0.0, 1.0 - turnover / PEAK_TURNOVERS)
        ahead = min(total, max(self._min_ahead, int(self._peak * PEAK_FACTOR)))
        missing = ahead - cache.free
        if missing <= 0 or not self._has_changed(ahead // 4):
            return
        units = self._find_victims(writer.tier, missing)
        missing -= cache.evictable
        for request in running if missing > 0 else ():
            units += self._registered_units(request)
            missing -= request.run_blocks
            if missing <= 0:
                break
        writer.replace(units)
        self._parked = (-1, 0)

    def _store_preempted(self, writer: UnitWriter, running: dict[FastRequest, None]) -> None:
        """Store the units of the request that is preempted next, if few blocks are left."""
        if len(running) < MIN_PREEMPTIBLE:
            return
        if self._cache.available > GROWTH_BLOCKS * len(running):
            return
        last = next(reversed(running))
        state = (last.row, last.held_units)
        if state != self._parked:
            self._parked = state
            writer.add(self._registered_units(last))

    def _has_changed(self, blocks: int) -> bool:
        """Whether `blocks` were registered or became evictable since this was last true."""
        registered, evictable = self._cache.registrations, self._cache.evictable
        self._evictable = min(self._evictable, evictable)
        if max(registered - self._registered, evictable - self._evictable) < blocks:
            return False
        self._registered, self._evictable = registered, evictable
        return True

    def _find_victims(self, tier: TierUnits, blocks: int) -> list[Unit]:
        """Return the units of up to `blocks` that are evicted next. Of those that nobody finds,
        each part goes down once."""
        units: list[Unit] = []
        before, self._stored_unnamed = self._stored_unnamed, {}
        for run, (key, size) in self._cache.next_victims(blocks):
            if key == NO_KEY:
                evicted = run.whole - run.blocks
                stored = max(evicted, before.get(run, 0))
                self._stored_unnamed[run] = end = max(stored, evicted + size)
                if end > stored:
                    units.append((tier.new_key(), end - stored))
            else:
                units.append((key, size))
        return units

    def _registered_units(self, request: FastRequest) -> list[Unit]:
        """Return the cached units of a request, the last one first."""
        unit, blocks = self._cache.unit, request.run_blocks
        keys = request.keys[: request.held_units]
        sizes = [min(unit, blocks - at * unit) for at in range(len(keys))]
        return [each for each in zip(keys, sizes, strict=True) if each[1] > 0][::-1]

    def _on_evicted(self, keys: Sequence[int]) -> None:
        for writer in self.writers:
            writer.discard(keys)


def _round(seconds: float) -> float:
    return float(f"{seconds:.2g}")
