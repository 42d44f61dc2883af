"""The places of all workers: how many are taken, and when the next become free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable

from dynamo.core.values import Load
from dynamo.scheduling.admission.durations import Durations
from dynamo.scheduling.router.fleet import Active, Book

BOUNDLESS = 1 << 20
"""Places of a worker that does not tell."""
REPORT_AGE_S = 1.0
"""A busy worker reports ten times a second; what is older is not believed."""
LEAST_SHARE = 0.05


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
    worker reported; `live`: it is among those that may be chosen."""

    __slots__ = (
        "_peak",
        "_peak_before",
        "_reported_s",
        "_share",
        "_tokens",
        "book",
        "held",
        "live",
        "open",
        "others",
    )

    def __init__(self) -> None:
        self.book: Book | None = None
        self.held: set[Held] = set()
        self.live = False
        self.open = 0
        self.others = 0
        self._tokens = 0.0
        self._share = 1.0
        self._peak = self._peak_before = 0
        self._reported_s = float("-inf")

    @property
    def idle(self) -> bool:
        """It has nothing to do."""
        return not self.held and not self.others

    def take(self, held: Held) -> None:
        """One place less."""
        self.held.add(held)
        self._tokens += held.need
        self._peak = max(self._peak, len(self.held))

    def leave(self, held: Held) -> None:
        """One place more."""
        self.held.discard(held)
        self._tokens = self._tokens - held.need if self.held else 0.0

    def reported(self, load: Load, now: float) -> None:
        """The worker's word. It is older than what is known here, so of our own requests as many
        count as were there since the report before."""
        self._reported_s = now
        ours = max(self._peak, self._peak_before, len(self.held))
        self._peak_before, self._peak = self._peak, len(self.held)
        self.others = max(0, load.running + load.waiting - ours)
        info = self.book.info if self.book else None
        if info and self._tokens and self.held and not self.others:
            share = min(1.0, load.active_blocks * info.block_tokens / self._tokens)
            self._share = max(LEAST_SHARE, self._share + 0.1 * (share - self._share))

    def count(self, cap: int, typical: float, now: float) -> int:
        """Free places, of at most `cap` (0: what the engine says), for requests that take `typical`
        tokens of memory."""
        if now - self._reported_s > REPORT_AGE_S:
            self.others = 0
        info = self.book.info if self.book else None
        places = info.max_num_seqs if info else BOUNDLESS
        if cap:
            places = min(places, cap)
        taken = len(self.held) + self.others
        free = places - taken
        if info and taken and free > 0:
            room = info.num_blocks * info.block_tokens - self._tokens * self._share
            free = min(free, int(room / max(1.0, typical * self._share)))
        return max(0, free)


class Places:
    """All desks. `free`: places in all; `full`: workers without one."""

    def __init__(self, cap: int, now: Callable[[], float]) -> None:
        self.desks: dict[str, Desk] = {}
        self.durations = Durations()
        self.free = 0
        self.full: frozenset[str] = frozenset()
        self._cap = cap
        self._now = now
        self._typical = 0.0
        self._ends: list[float] = []
        self._ends_s = float("-inf")

    def announced(self, books: Iterable[tuple[str, Book | None]]) -> None:
        """These are the workers that may be chosen from now on."""
        live = dict(books)
        for name in live.keys() - self.desks.keys():
            self.desks[name] = Desk()
        for name, desk in tuple(self.desks.items()):
            desk.live = name in live
            desk.book = live.get(name, desk.book)
            if not desk.live and not desk.held:
                del self.desks[name]
        self.recount()

    def recount(self) -> None:
        """Look at every worker anew."""
        now = self._now()
        self.free = 0
        full = []
        for name, desk in self.desks.items():
            desk.open = desk.count(self._cap, self._typical, now) if desk.live else 0
            self.free += desk.open
            if desk.live and not desk.open:
                full.append(name)
        self.full = frozenset(full)
        self._ends_s = float("-inf")

    def take(self, name: str, held: Held) -> None:
        """The request goes to that worker now."""
        desk = self.desks.get(name)
        if desk is None:
            desk = self.desks[name] = Desk()
        desk.take(held)
        self._typical += 0.1 * (held.need - self._typical) if self._typical else held.need
        self._changed(name, desk)

    def leave(self, name: str, held: Held) -> None:
        """It left."""
        desk = self.desks[name]
        desk.leave(held)
        if desk.live or desk.held:
            self._changed(name, desk)
        else:
            del self.desks[name]

    def reported(self, name: str, load: Load, now: float) -> None:
        """A worker's own word about its load."""
        desk = self.desks.get(name)
        if desk is not None:
            desk.reported(load, now)
            self._changed(name, desk)

    def open_desks(self) -> list[Desk]:
        """Those with a free place."""
        return [desk for desk in self.desks.values() if desk.open]

    def anybody_idle(self, barred: frozenset[str]) -> bool:
        """Whether a worker that may be chosen has nothing to do."""
        return any(
            desk.live and desk.idle and name not in barred for name, desk in self.desks.items()
        )

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
        ends: list[float] = []
        for desk in self.desks.values():
            if not desk.live:
                continue
            ends += [now + rest(held.bound, now - held.began_s) for held in desk.held]
            ends += [now + rest(1 << 10, 0.0)] * desk.others
            ends += [now] * min(desk.open, 1 << 10)
        ends.sort()
        self._ends, self._ends_s = ends, now

    def _changed(self, name: str, desk: Desk) -> None:
        before = desk.open
        desk.open = desk.count(self._cap, self._typical, self._now()) if desk.live else 0
        self.free += desk.open - before
        if desk.live and (desk.open == 0) != (name in self.full):
            self.full = self.full - {name} if desk.open else self.full | {name}
        self._ends_s = float("-inf") if len(self._ends) <= 64 else self._ends_s
