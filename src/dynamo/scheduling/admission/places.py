"""The places of all workers: how many are taken, and when the next become free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping

from dynamo.core.values import EngineInfo, Load
from dynamo.runtime.instances import Instance
from dynamo.scheduling.admission.durations import Durations
from dynamo.scheduling.router.placing.fleet import Active, Book
from dynamo.scheduling.router.placing.ranks import engine_info

BOUNDLESS = 1 << 20
"""Places of a worker that does not tell."""
REPORT_AGE_S = 1.0
"""A busy worker reports ten times a second; what is older is not believed."""
ALWAYS_FRESH = 64
"""Up to so many ends are looked at anew for every request that waits."""
UNSEEN = (0, 0, 0)
LEAST_SHARE = 0.05
STUFFED = 0.9
"""A worker with so much of its memory in use and somebody waiting there has no place, whatever was
expected of its answers."""


class Held:
    """One request in its place. `bound`: its max_tokens; `need`: tokens of KV memory that it will
    have taken; `predicted_s`: when its first token was expected, where it waited (else None)."""

    __slots__ = ("active", "began_s", "bound", "first_s", "need", "predicted_s", "tokens")

    def __init__(self, bound: int, need: float, now: float) -> None:
        self.bound = bound
        self.need = need
        self.began_s = now
        self.first_s: float | None = None
        self.predicted_s: float | None = None
        self.tokens = 0
        self.active: Active | None = None


class Desk:
    """One worker's places. `open`: free ones; `others`: taken by requests that are not ours, as the
    worker reported; `idle`: it has nothing to do; `live`: it is among those that may be chosen."""

    __slots__ = (
        "_info",
        "_memory",
        "_peak",
        "_peak_before",
        "_places",
        "_reported_s",
        "_seen",
        "_share",
        "_stuffed",
        "_tokens",
        "book",
        "held",
        "idle",
        "live",
        "open",
        "others",
    )

    def __init__(self) -> None:
        self.book: Book | None = None
        self._info: EngineInfo | None = None
        self._places = BOUNDLESS
        self._memory = 0
        self.held: set[Held] = set()
        self.live = False
        self.idle = False
        self.open = 0
        self.others = 0
        self._tokens = 0.0
        self._share = 1.0
        self._stuffed = False
        self._peak = self._peak_before = 0
        self._seen = UNSEEN
        self._reported_s = float("-inf")

    def announce(self, info: EngineInfo | None, cap: int) -> None:
        """What its engine is; `cap`: requests at a time, at most (0: what the engine says)."""
        self._info = info
        self._places = info.max_num_seqs if info else BOUNDLESS
        if cap:
            self._places = min(self._places, cap)
        self._memory = info.num_blocks * info.block_tokens if info else 0

    def take(self, held: Held) -> None:
        """One place less."""
        self.held.add(held)
        self._tokens += held.need
        if len(self.held) > self._peak:
            self._peak = len(self.held)

    def leave(self, held: Held) -> None:
        """One place more."""
        self.held.discard(held)
        self._tokens = self._tokens - held.need if self.held else 0.0

    def reported(self, load: Load, now: float) -> None:
        """The worker's word. It is older than what is known here, so of our own requests as many
        count as were there since the report before; and of the others as many as in any of the last
        few, for who has just lost a request fills that place again."""
        self._reported_s = now
        ours = max(self._peak, self._peak_before, len(self.held))
        self._peak_before, self._peak = self._peak, len(self.held)
        self._seen = (*self._seen[1:], max(0, load.running + load.waiting - ours))
        self.others = max(self._seen)
        self._stuffed = load.waiting > 0 and load.active_blocks > STUFFED * load.total_blocks > 0
        info = self._info
        if info and self._tokens and self.held and not self.others:
            share = min(1.0, load.active_blocks * info.block_tokens / self._tokens)
            self._share = max(LEAST_SHARE, self._share + 0.1 * (share - self._share))

    def count(self, typical: float, now: float) -> int:
        """Free places for requests that take `typical` tokens of memory."""
        if now - self._reported_s > REPORT_AGE_S:
            self.others, self._seen, self._stuffed = 0, UNSEEN, False
        if self._stuffed:
            return 0
        taken = len(self.held) + self.others
        free = self._places - taken
        if self._memory and taken and free > 0:
            needed = typical * self._share
            left = self._memory - self._tokens * self._share
            if left < free * needed:
                free = int(left / needed)
        return max(0, free)


class Places:
    """All desks. `cap`: requests that any worker is given at a time (0: as many as its engine works
    on), for all desks with the next `announced`; `free`: places in all; `idle`: workers that have
    nothing to do; `full`: workers without a place."""

    def __init__(self, cap: int, now: Callable[[], float]) -> None:
        self.desks: dict[str, Desk] = {}
        self.durations = Durations()
        self.free = 0
        self.idle = 0
        self.full: frozenset[str] = frozenset()
        self.cap = cap
        self._now = now
        self._typical = 0.0
        self._ends: list[float] = []
        self._ends_s = float("-inf")

    def announced(self, live: Mapping[str, Instance], books: Mapping[str, Book]) -> None:
        """These are the workers that may be chosen from now on, with those of their books that are
        kept."""
        for name in live.keys() - self.desks.keys():
            self.desks[name] = Desk()
        for name, desk in tuple(self.desks.items()):
            instance = live.get(name)
            desk.live = instance is not None
            if instance is not None:
                desk.announce(engine_info(instance), self.cap)
                desk.book = books.get(name)
            if not desk.live and not desk.held:
                self._changed(name, desk, self._now())
                del self.desks[name]
        self.recount()

    def recount(self) -> None:
        """Look at every worker anew."""
        now = self._now()
        for name, desk in self.desks.items():
            self._changed(name, desk, now)
        self._ends_s = float("-inf")

    def take(self, name: str, held: Held, now: float) -> None:
        """The request goes to that worker now."""
        desk = self.desks.get(name)
        if desk is None:
            desk = self.desks[name] = Desk()
        desk.take(held)
        self._typical += 0.1 * (held.need - self._typical) if self._typical else held.need
        self._changed(name, desk, now)

    def leave(self, name: str, held: Held, now: float) -> None:
        """It left."""
        desk = self.desks[name]
        desk.leave(held)
        if desk.live or desk.held:
            self._changed(name, desk, now)
        else:
            del self.desks[name]

    def reported(self, name: str, load: Load, now: float) -> None:
        """A worker's own word about its load."""
        desk = self.desks.get(name)
        if desk is not None:
            desk.reported(load, now)
            self._changed(name, desk, now)

    @property
    def shared(self) -> bool:
        """Whether others have places, too."""
        return any(desk.others for desk in self.desks.values())

    def open_desks(self) -> list[Desk]:
        """Those with a free place."""
        return [desk for desk in self.desks.values() if desk.open]

    def anybody_idle(self, barred: frozenset[str]) -> bool:
        """Whether a worker that may be chosen has nothing to do."""
        return any(desk.idle and name not in barred for name, desk in self.desks.items())

    def wait_s(self, ahead: int, bound: int) -> float:
        """How long one of that bound, with so many before it, waits for a place."""
        now = self._now()
        if now - self._ends_s > 0.005 + 1e-4 * len(self._ends):
            self._look_ahead(now)
        ends = self._ends
        if not ends:
            return 0.0
        rounds, at = divmod(ahead, len(ends))
        return max(0.0, ends[at] - now) + rounds * self.durations.rest(bound, 0.0)

    def gap_s(self, bound: int) -> float:
        """Between two places that become free, on average."""
        return self.durations.rest(bound, 0.0) / max(1, len(self._ends))

    def granted(self, bound: int) -> None:
        """The next place that becomes free is given away."""
        if self._ends:
            begins = max(self._ends.pop(0), self._now())
            insort(self._ends, begins + self.durations.rest(bound, 0.0))

    def _look_ahead(self, now: float) -> None:
        rest = self.durations.rest
        whole_s = rest(1 << 10, 0.0)
        ends: list[float] = []
        for desk in self.desks.values():
            if not desk.live:
                continue
            ends += [now + rest(held.bound, now - held.began_s) for held in desk.held]
            others = desk.others
            ends += [now + whole_s * at / others for at in range(1, others + 1)]
            ends += [now] * min(desk.open, 1 << 10)
        ends.sort()
        self._ends, self._ends_s = ends, now

    def _changed(self, name: str, desk: Desk, now: float) -> None:
        live, before = desk.live, desk.open
        desk.open = free = desk.count(self._typical, now) if live else 0
        self.free += free - before
        idle = live and not desk.held and not desk.others
        if idle != desk.idle:
            desk.idle = idle
            self.idle += 1 if idle else -1
        if live and not free:
            self.full |= {name}
        elif not before:
            self.full -= {name}
        if len(self._ends) <= ALWAYS_FRESH:
            self._ends_s = float("-inf")
