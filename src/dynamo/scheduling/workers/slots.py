"""The capacity of all workers: occupied slots, and predictions of when the next become free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo.core.kv_events import split_worker_name
from dynamo.core.values import EngineInfo, Load
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.data_parallel import (
    data_parallel_ranks,
    engine_info,
    list_workers,
    split_load,
)
from dynamo.scheduling.workers.durations import DurationModel
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState

DEFAULT_MAX_REQUESTS = 1 << 20
"""Slots of a worker that announces no engine."""
MAX_REPORT_AGE_S = 1.0
"""A busy worker reports ten times a second. Older reports are ignored."""
MAX_UNCACHED_ENDS = 64
"""Up to this many predicted ends are recomputed for every queued request."""
NO_REPORTS = (0, 0, 0)
MIN_MEMORY_USE_RATIO = 0.05
FULL_MEMORY_SHARE = 0.9
"""A worker with waiting requests and this share of its KV blocks in use has no free slot."""


@dataclass(eq=False, slots=True)
class Reservation:
    """The slot of one request at a worker.

    `kv_tokens` is the predicted size of its KV cache at the end. `predicted_first_token_s` is None
    for a request that did not queue.
    """

    max_tokens: int
    kv_tokens: float
    started_s: float
    first_token_s: float | None = None
    predicted_first_token_s: float | None = None
    output_tokens: int = 0
    placed_request: PlacedRequest | None = None


class WorkerCapacity:
    """The slots of one worker, or of one of its data-parallel ranks.

    `foreign_requests` occupy slots but were not sent by this frontend. `live`: the worker may be
    chosen.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.instance_id, self._rank = split_worker_name(name)
        self.state: WorkerState | None = None
        self._info: EngineInfo | None = None
        self._max_requests = DEFAULT_MAX_REQUESTS
        self._kv_capacity_tokens = 0
        self.reservations: set[Reservation] = set()
        self.live = False
        self.free_slots = 0
        self.foreign_requests = 0
        self._reserved_tokens = 0.0
        self._memory_use_ratio = 1.0
        self._memory_full = False
        self._peak_requests = self._previous_peak_requests = 0
        self._recent_foreign_requests = NO_REPORTS
        self._last_report_s = float("-inf")

    @property
    def idle(self) -> bool:
        """Whether a live worker has no requests, and computes no prompt for another worker."""
        busy = self.reservations or self.foreign_requests
        return self.live and not busy and not (self.state and self.state.pending_prefills)

    def configure(self, instance: Instance, max_requests: int) -> None:
        """Set the engine's sizes. `max_requests` 0 means no limit beyond the engine's. Ranks share
        both."""
        self._info = info = engine_info(instance, self._rank)
        if max_requests:
            max_requests = max(1, max_requests // len(data_parallel_ranks(instance)))
        self._max_requests = info.max_num_seqs if info else DEFAULT_MAX_REQUESTS
        if max_requests:
            self._max_requests = min(self._max_requests, max_requests)
        self._kv_capacity_tokens = info.num_blocks * info.block_tokens if info else 0

    def reserve(self, reservation: Reservation) -> None:
        """Occupy a slot."""
        self.reservations.add(reservation)
        self._reserved_tokens += reservation.kv_tokens
        if len(self.reservations) > self._peak_requests:
            self._peak_requests = len(self.reservations)

    def release(self, reservation: Reservation) -> None:
        """Free the slot."""
        self.reservations.discard(reservation)
        self._reserved_tokens -= reservation.kv_tokens
        if not self.reservations:
            self._reserved_tokens = 0.0

    def on_load_report(self, load: Load, now: float) -> None:
        """Apply a load report, which is older than the reservations known here.

        The peak of our requests since the report before the last is subtracted from the load. The
        largest of the last three remainders counts as foreign, because another frontend soon
        refills a slot in which its request has just ended.
        """
        self._last_report_s = now
        own = len(self.reservations)
        peak = max(self._peak_requests, self._previous_peak_requests, own)
        self._previous_peak_requests, self._peak_requests = self._peak_requests, own
        foreign = max(0, load.running + load.waiting - peak)
        self._recent_foreign_requests = (*self._recent_foreign_requests[1:], foreign)
        self.foreign_requests = max(self._recent_foreign_requests)
        self._memory_full = (
            load.waiting > 0 and load.active_blocks > FULL_MEMORY_SHARE * load.total_blocks > 0
        )
        info = self._info
        if info and self._reserved_tokens and own and not self.foreign_requests:
            share = min(1.0, load.active_blocks * info.block_tokens / self._reserved_tokens)
            ratio = self._memory_use_ratio + 0.1 * (share - self._memory_use_ratio)
            self._memory_use_ratio = max(MIN_MEMORY_USE_RATIO, ratio)

    def count_free_slots(self, mean_kv_tokens: float, now: float) -> int:
        """Return how many more requests of `mean_kv_tokens` fit."""
        if now - self._last_report_s > MAX_REPORT_AGE_S:
            self.foreign_requests, self._memory_full = 0, False
            self._recent_foreign_requests = NO_REPORTS
        if self._memory_full:
            return 0
        occupied = len(self.reservations) + self.foreign_requests
        free = self._max_requests - occupied
        if self._kv_capacity_tokens and occupied and free > 0:
            needed = mean_kv_tokens * self._memory_use_ratio
            left = self._kv_capacity_tokens - self._reserved_tokens * self._memory_use_ratio
            if left < free * needed:
                free = int(left / needed)
        return max(0, free)


@dataclass(slots=True)
class SlotForecast:
    """When the slots of some workers become free: times in order, and the time of the forecast."""

    ends: list[float]
    made_at_s: float = float("-inf")


class ClusterCapacity:
    """The slots of all workers, by the names of their worker states: those of ranks, where
    instances have several.

    `max_worker_requests` limits each instance after the next `update_workers` (0: the engine's
    limit). `full_workers` are live workers without a free slot, and the instances all of whose
    ranks are.
    """

    def __init__(self, max_worker_requests: int, now: Callable[[], float]) -> None:
        self.workers: dict[str, WorkerCapacity] = {}
        self.durations = DurationModel()
        self.free_slots = 0
        self.full_workers: frozenset[str] = frozenset()
        self.max_worker_requests = max_worker_requests
        self._now = now
        self._mean_kv_tokens = 0.0
        self._forecast = SlotForecast([])
        self._label_forecasts: dict[frozenset[str], SlotForecast] = {}

    def update_workers(
        self, live: Mapping[str, Instance], states: Mapping[str, WorkerState]
    ) -> None:
        """Set the instances that may be chosen, with the worker states that exist for them."""
        live_workers = list_workers(live)
        for name in live_workers:
            if name not in self.workers:  # in order, so that equal workers are chosen in order
                self.workers[name] = WorkerCapacity(name)
        for name, worker in tuple(self.workers.items()):
            worker.live = name in live_workers
            if worker.live:
                instance, _ = live_workers[name]
                worker.configure(instance, self.max_worker_requests)
                worker.state = states.get(name)
            elif not worker.reservations:
                self._update_totals(worker, self._now())
                del self.workers[name]
        self.refresh()

    def refresh(self) -> None:
        """Recount the slots of every worker."""
        now = self._now()
        for worker in self.workers.values():
            self._update_totals(worker, now)
        self._forecast.made_at_s = float("-inf")
        self._label_forecasts.clear()

    def reserve(self, name: str, reservation: Reservation, now: float) -> None:
        """Occupy a slot. The worker may be unknown yet."""
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = WorkerCapacity(name)
        worker.reserve(reservation)
        mean, kv_tokens = self._mean_kv_tokens, reservation.kv_tokens
        self._mean_kv_tokens += 0.1 * (kv_tokens - mean) if mean else kv_tokens
        self._update_totals(worker, now)

    def release(self, name: str, reservation: Reservation, now: float) -> None:
        """Free the slot. A worker that is gone is removed with its last reservation."""
        worker = self.workers[name]
        worker.release(reservation)
        if worker.live or worker.reservations:
            self._update_totals(worker, now)
        else:
            del self.workers[name]

    def on_load_report(self, instance: str, load: Load, now: float) -> None:
        """Apply an instance's load report, that of each rank to its worker."""
        for name, part in split_load(instance, load).items():
            if (worker := self.workers.get(name)) is not None:
                worker.on_load_report(part, now)
                self._update_totals(worker, now)

    @property
    def has_foreign_requests(self) -> bool:
        """Whether other frontends occupy slots, too."""
        return any(worker.foreign_requests for worker in self.workers.values())

    def count_idle(self, excluded: frozenset[str] = frozenset()) -> int:
        """Return how many workers of instances that are not excluded are idle."""
        workers = self.workers.values()
        return sum(worker.idle and worker.instance_id not in excluded for worker in workers)

    def count_suitable_slots(self, excluded: frozenset[str]) -> int:
        """Return the number of free slots at instances that are not excluded."""
        if not excluded:
            return self.free_slots
        workers = self.workers.values()
        return sum(worker.free_slots for worker in workers if worker.instance_id not in excluded)

    def predict_wait_s(
        self, ahead: int, max_tokens: int, excluded: frozenset[str] = frozenset()
    ) -> float:
        """Return the predicted wait behind `ahead` others for a slot, without the instances that
        are excluded."""
        now, ends = self._now(), self._forecast_for(excluded).ends
        if not ends:
            return 0.0
        rounds, index = divmod(ahead, len(ends))
        whole_s = self.durations.predict_remaining_s(max_tokens, 0.0)
        return max(0.0, ends[index] - now) + rounds * whole_s

    def predict_gap_s(self, max_tokens: int) -> float:
        """Return the predicted mean time between two freed slots."""
        whole_s = self.durations.predict_remaining_s(max_tokens, 0.0)
        return whole_s / max(1, len(self._forecast.ends))

    def assign_next_slot(self, max_tokens: int, excluded: frozenset[str] = frozenset()) -> None:
        """Give the next free slot to a request, so that the predictions count its end."""
        forecasts = [self._forecast]
        if excluded in self._label_forecasts:
            forecasts.append(self._label_forecasts[excluded])
        for forecast in forecasts:
            if forecast.ends:
                starts_s = max(forecast.ends.pop(0), self._now())
                whole_s = self.durations.predict_remaining_s(max_tokens, 0.0)
                insort(forecast.ends, starts_s + whole_s)

    def _forecast_for(self, excluded: frozenset[str]) -> SlotForecast:
        """Return the forecast of the other instances, made anew where it is old."""
        forecast = self._forecast
        if excluded:
            forecast = self._label_forecasts.setdefault(excluded, SlotForecast([]))
        now = self._now()
        if now - forecast.made_at_s > 0.005 + 1e-4 * len(forecast.ends):
            forecast.ends, forecast.made_at_s = self._predict_ends(now, excluded), now
        return forecast

    def _predict_ends(self, now: float, excluded: frozenset[str]) -> list[float]:
        remaining_s = self.durations.predict_remaining_s
        foreign_s = self.durations.predict_mean_s()
        ends: list[float] = []
        for worker in self.workers.values():
            if worker.live and worker.instance_id not in excluded:
                held = worker.reservations
                ends += [now + remaining_s(slot.max_tokens, now - slot.started_s) for slot in held]
                foreign = worker.foreign_requests
                ends += [now + foreign_s * rank / foreign for rank in range(1, foreign + 1)]
                ends += [now] * min(worker.free_slots, 1 << 10)
        ends.sort()
        return ends

    def _update_totals(self, worker: WorkerCapacity, now: float) -> None:
        live, before = worker.live, worker.free_slots
        worker.free_slots = free = worker.count_free_slots(self._mean_kv_tokens, now) if live else 0
        self.free_slots += free - before
        full = live and not free
        if full or not before:
            self._set_full(worker, full=full)
        if len(self._forecast.ends) <= MAX_UNCACHED_ENDS:
            self._forecast.made_at_s = float("-inf")
            self._label_forecasts.clear()

    def _set_full(self, worker: WorkerCapacity, *, full: bool) -> None:
        """Add a worker to the full ones or remove it, and its instance with the last rank."""
        names, instance_id = {worker.name}, worker.instance_id
        if full == (worker.name in self.full_workers):
            return
        if worker.name != instance_id:
            ranks = [each for each in self.workers.values() if each.instance_id == instance_id]
            others = {each.name for each in ranks if each.live} - names
            if not full or others <= self.full_workers:
                names.add(instance_id)
        self.full_workers = self.full_workers | names if full else self.full_workers - names
