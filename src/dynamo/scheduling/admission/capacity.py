"""The places of all workers: how many are taken, and when the next become free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping

from dynamo.core.values import EngineInfo, Load
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission.durations import DurationModel
from dynamo.scheduling.router.data_parallel import engine_info
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerState

DEFAULT_MAX_REQUESTS = 1 << 20
"""Places of a worker that does not tell."""
MAX_REPORT_AGE_S = 1.0
"""A busy worker reports ten times a second; what is older is not believed."""
MAX_UNCACHED_ENDS = 64
"""Up to so many ends are looked at anew for every request that waits."""
NO_REPORTS = (0, 0, 0)
MIN_MEMORY_USE_RATIO = 0.05
FULL_MEMORY_SHARE = 0.9
"""A worker with so much of its memory in use and somebody waiting there has no place, whatever was
expected of its answers."""


class Reservation:
    """One request in its place. `bound`: its max_tokens; `need`: tokens of KV memory that it will
    have taken; `predicted_s`: when its first token was expected, where it waited (else None)."""

    __slots__ = (
        "first_token_s",
        "kv_tokens",
        "max_tokens",
        "output_tokens",
        "placed_request",
        "predicted_first_token_s",
        "started_s",
    )

    def __init__(self, bound: int, need: float, now: float) -> None:
        self.max_tokens = bound
        self.kv_tokens = need
        self.started_s = now
        self.first_token_s: float | None = None
        self.predicted_first_token_s: float | None = None
        self.output_tokens = 0
        self.placed_request: PlacedRequest | None = None


class WorkerCapacity:
    """One worker's places. `open`: free ones; `others`: taken by requests that are not ours, as the
    worker reported; `idle`: it has nothing to do; `live`: it is among those that may be chosen."""

    __slots__ = (
        "_info",
        "_kv_capacity_tokens",
        "_last_report_s",
        "_max_requests",
        "_memory_full",
        "_memory_use_ratio",
        "_peak_requests",
        "_previous_peak_requests",
        "_recent_foreign_requests",
        "_reserved_tokens",
        "foreign_requests",
        "free_slots",
        "idle",
        "live",
        "reservations",
        "state",
    )

    def __init__(self) -> None:
        self.state: WorkerState | None = None
        self._info: EngineInfo | None = None
        self._max_requests = DEFAULT_MAX_REQUESTS
        self._kv_capacity_tokens = 0
        self.reservations: set[Reservation] = set()
        self.live = False
        self.idle = False
        self.free_slots = 0
        self.foreign_requests = 0
        self._reserved_tokens = 0.0
        self._memory_use_ratio = 1.0
        self._memory_full = False
        self._peak_requests = self._previous_peak_requests = 0
        self._recent_foreign_requests = NO_REPORTS
        self._last_report_s = float("-inf")

    def configure(self, info: EngineInfo | None, cap: int) -> None:
        """What its engine is; `cap`: requests at a time, at most (0: what the engine says)."""
        self._info = info
        self._max_requests = info.max_num_seqs if info else DEFAULT_MAX_REQUESTS
        if cap:
            self._max_requests = min(self._max_requests, cap)
        self._kv_capacity_tokens = info.num_blocks * info.block_tokens if info else 0

    def reserve(self, held: Reservation) -> None:
        """One place less."""
        self.reservations.add(held)
        self._reserved_tokens += held.kv_tokens
        if len(self.reservations) > self._peak_requests:
            self._peak_requests = len(self.reservations)

    def release(self, held: Reservation) -> None:
        """One place more."""
        self.reservations.discard(held)
        self._reserved_tokens = self._reserved_tokens - held.kv_tokens if self.reservations else 0.0

    def on_load_report(self, load: Load, now: float) -> None:
        """The worker's word. It is older than what is known here, so of our own requests as many
        count as were there since the report before; and of the others as many as in any of the last
        few, for who has just lost a request fills that place again."""
        self._last_report_s = now
        ours = max(self._peak_requests, self._previous_peak_requests, len(self.reservations))
        self._previous_peak_requests, self._peak_requests = (
            self._peak_requests,
            len(self.reservations),
        )
        self._recent_foreign_requests = (
            *self._recent_foreign_requests[1:],
            max(0, load.running + load.waiting - ours),
        )
        self.foreign_requests = max(self._recent_foreign_requests)
        self._memory_full = (
            load.waiting > 0 and load.active_blocks > FULL_MEMORY_SHARE * load.total_blocks > 0
        )
        info = self._info
        if info and self._reserved_tokens and self.reservations and not self.foreign_requests:
            share = min(1.0, load.active_blocks * info.block_tokens / self._reserved_tokens)
            self._memory_use_ratio = max(
                MIN_MEMORY_USE_RATIO,
                self._memory_use_ratio + 0.1 * (share - self._memory_use_ratio),
            )

    def count_free_slots(self, typical: float, now: float) -> int:
        """Free places for requests that take `typical` tokens of memory."""
        if now - self._last_report_s > MAX_REPORT_AGE_S:
            self.foreign_requests, self._recent_foreign_requests, self._memory_full = (
                0,
                NO_REPORTS,
                False,
            )
        if self._memory_full:
            return 0
        taken = len(self.reservations) + self.foreign_requests
        free = self._max_requests - taken
        if self._kv_capacity_tokens and taken and free > 0:
            needed = typical * self._memory_use_ratio
            left = self._kv_capacity_tokens - self._reserved_tokens * self._memory_use_ratio
            if left < free * needed:
                free = int(left / needed)
        return max(0, free)


class ClusterCapacity:
    """All desks. `cap`: requests that any worker is given at a time (0: as many as its engine works
    on), for all desks with the next `announced`; `free`: places in all; `idle`: workers that have
    nothing to do; `full`: workers without a place."""

    def __init__(self, max_worker_requests: int, now: Callable[[], float]) -> None:
        self.workers: dict[str, WorkerCapacity] = {}
        self.durations = DurationModel()
        self.free_slots = 0
        self.idle_workers = 0
        self.full_workers: frozenset[str] = frozenset()
        self.max_worker_requests = max_worker_requests
        self._now = now
        self._mean_kv_tokens = 0.0
        self._predicted_ends: list[float] = []
        self._predicted_at_s = float("-inf")

    def update_workers(
        self, live: Mapping[str, Instance], books: Mapping[str, WorkerState]
    ) -> None:
        """These are the workers that may be chosen from now on, with those of their books that are
        kept."""
        for name in live.keys() - self.workers.keys():
            self.workers[name] = WorkerCapacity()
        for name, desk in tuple(self.workers.items()):
            instance = live.get(name)
            desk.live = instance is not None
            if instance is not None:
                desk.configure(engine_info(instance), self.max_worker_requests)
                desk.state = books.get(name)
            if not desk.live and not desk.reservations:
                self._update_totals(name, desk, self._now())
                del self.workers[name]
        self.refresh()

    def refresh(self) -> None:
        """Look at every worker anew."""
        now = self._now()
        for name, desk in self.workers.items():
            self._update_totals(name, desk, now)
        self._predicted_at_s = float("-inf")

    def reserve(self, name: str, held: Reservation, now: float) -> None:
        """The request goes to that worker now."""
        desk = self.workers.get(name)
        if desk is None:
            desk = self.workers[name] = WorkerCapacity()
        desk.reserve(held)
        self._mean_kv_tokens += (
            0.1 * (held.kv_tokens - self._mean_kv_tokens)
            if self._mean_kv_tokens
            else held.kv_tokens
        )
        self._update_totals(name, desk, now)

    def release(self, name: str, held: Reservation, now: float) -> None:
        """It left."""
        desk = self.workers[name]
        desk.release(held)
        if desk.live or desk.reservations:
            self._update_totals(name, desk, now)
        else:
            del self.workers[name]

    def on_load_report(self, name: str, load: Load, now: float) -> None:
        """A worker's own word about its load."""
        desk = self.workers.get(name)
        if desk is not None:
            desk.on_load_report(load, now)
            self._update_totals(name, desk, now)

    @property
    def has_foreign_requests(self) -> bool:
        """Whether others have places, too."""
        return any(desk.foreign_requests for desk in self.workers.values())

    def list_workers_with_free_slots(self) -> list[WorkerCapacity]:
        """Those with a free place."""
        return [desk for desk in self.workers.values() if desk.free_slots]

    def has_idle_worker(self, barred: frozenset[str]) -> bool:
        """Whether a worker that may be chosen has nothing to do."""
        return any(desk.idle and name not in barred for name, desk in self.workers.items())

    def predict_wait_s(self, ahead: int, bound: int) -> float:
        """How long one of that bound, with so many before it, waits for a place."""
        now = self._now()
        if now - self._predicted_at_s > 0.005 + 1e-4 * len(self._predicted_ends):
            self._predict_ends(now)
        ends = self._predicted_ends
        if not ends:
            return 0.0
        rounds, at = divmod(ahead, len(ends))
        return max(0.0, ends[at] - now) + rounds * self.durations.predict_remaining_s(bound, 0.0)

    def predict_gap_s(self, bound: int) -> float:
        """Between two places that become free, on average."""
        return self.durations.predict_remaining_s(bound, 0.0) / max(1, len(self._predicted_ends))

    def assign_next_slot(self, bound: int) -> None:
        """The next place that becomes free is given away."""
        if self._predicted_ends:
            begins = max(self._predicted_ends.pop(0), self._now())
            insort(self._predicted_ends, begins + self.durations.predict_remaining_s(bound, 0.0))

    def _predict_ends(self, now: float) -> None:
        rest = self.durations.predict_remaining_s
        whole_s = rest(1 << 10, 0.0)
        ends: list[float] = []
        for desk in self.workers.values():
            if not desk.live:
                continue
            ends += [
                now + rest(held.max_tokens, now - held.started_s) for held in desk.reservations
            ]
            others = desk.foreign_requests
            ends += [now + whole_s * at / others for at in range(1, others + 1)]
            ends += [now] * min(desk.free_slots, 1 << 10)
        ends.sort()
        self._predicted_ends, self._predicted_at_s = ends, now

    def _update_totals(self, name: str, desk: WorkerCapacity, now: float) -> None:
        live, before = desk.live, desk.free_slots
        desk.free_slots = free = desk.count_free_slots(self._mean_kv_tokens, now) if live else 0
        self.free_slots += free - before
        idle = live and not desk.reservations and not desk.foreign_requests
        if idle != desk.idle:
            desk.idle = idle
            self.idle_workers += 1 if idle else -1
        if live and not free:
            self.full_workers |= {name}
        elif not before:
            self.full_workers -= {name}
        if len(self._predicted_ends) <= MAX_UNCACHED_ENDS:
            self._predicted_at_s = float("-inf")
