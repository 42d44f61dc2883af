"""The capacity of all workers: free slots, and predictions of when the next become free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.scheduling.workers.durations import DurationModel
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import WorkerStates

NEVER = float("-inf")
MAX_UNCACHED_ENDS = 64
"""Up to this many predicted ends are recomputed for every queued request."""


@dataclass(slots=True)
class SlotForecast:
    """When the slots of some workers become free: times in order, and the time of the forecast."""

    ends: list[float]
    made_at_s: float = NEVER


class ClusterCapacity:
    """The slots of all workers that answer, data-parallel ranks each.

    `max_worker_requests` limits each instance after the next `update_workers` (0: the engine's
    limit). `full_workers` are the names of workers without a free slot, and the ids of instances
    all of whose ranks are.
    """

    def __init__(
        self, states: WorkerStates, max_worker_requests: int, now: Callable[[], float]
    ) -> None:
        self._states = states
        self.workers: list[WorkerState] = []
        self.durations = DurationModel()
        self.free_slots = 0
        self.full_workers: frozenset[str] = frozenset()
        self.max_worker_requests = max_worker_requests
        self._now = now
        self._mean_kv_tokens = 0.0
        self._forecast = SlotForecast([])
        self._label_forecasts: dict[frozenset[str], SlotForecast] = {}

    def update_workers(self) -> None:
        """Follow the workers that may be chosen."""
        before, now = self.workers, self._now()
        self.workers = [worker for worker in self._states.workers if worker.decodes]
        for worker in before:
            if not (worker.live and worker.decodes):
                self._update_totals(worker, now)
        for worker in self.workers:
            ranks, limit = self._states.ranks_of(worker.instance.id), self.max_worker_requests
            share = max(1, limit // len(ranks)) if limit else 0
            worker.slots.configure(worker.engine_info, share)
        self.refresh()

    def refresh(self) -> None:
        """Recount the slots of every worker."""
        now = self._now()
        for worker in self.workers:
            self._update_totals(worker, now)
        self._forecast.made_at_s = NEVER
        self._label_forecasts.clear()

    def reserve(self, placed: PlacedRequest, now: float) -> None:
        """Reserve memory for a request that occupies a slot now."""
        output_tokens = self.durations.predict_output_tokens(placed.max_tokens)
        kv_tokens = placed.kv_tokens = placed.prompt_tokens + output_tokens
        worker = placed.decode_worker or placed.worker
        worker.slots.reserved_tokens += kv_tokens
        mean = self._mean_kv_tokens
        self._mean_kv_tokens += 0.1 * (kv_tokens - mean) if mean else kv_tokens
        self._update_totals(worker, now)

    def release(self, placed: PlacedRequest, now: float) -> None:
        """Release the memory of a request that has left its slot."""
        worker = placed.decode_worker or placed.worker
        slots = worker.slots
        slots.reserved_tokens = slots.reserved_tokens - placed.kv_tokens if slots.occupied else 0.0
        self._update_totals(worker, now)

    def recount(self, instance: str, now: float) -> None:
        """Recount the slots of an instance that has reported its load."""
        for worker in self._states.ranks_of(instance):
            self._update_totals(worker, now)

    @property
    def has_foreign_requests(self) -> bool:
        """Whether other frontends occupy slots, too."""
        return any(worker.slots.foreign_requests for worker in self.workers)

    def count_idle(self, excluded: frozenset[str] = frozenset()) -> int:
        """Return how many workers of instances that are not excluded have no requests, and compute
        no prompt for another worker."""
        now = self._now()
        return sum(
            not (worker.pending_prefills or worker.slots.is_occupied(now))
            and worker.instance.id not in excluded
            for worker in self.workers
        )

    def count_suitable_slots(self, excluded: frozenset[str]) -> int:
        """Return the number of free slots at instances that are not excluded."""
        if not excluded:
            return self.free_slots
        return sum(
            worker.slots.free_slots for worker in self.workers if worker.instance.id not in excluded
        )

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
        """Return the forecast of the other instances, computed again where it is old."""
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
        for worker in self.workers:
            if worker.instance.id not in excluded:
                ends += [
                    now + remaining_s(placed.max_tokens, now - placed.placed_s)
                    for requests in (worker.active, worker.arriving)
                    for placed in requests.values()
                    if not placed.peer and placed.decode_worker in (None, worker)
                ]
                foreign = worker.slots.foreign_requests
                ends += [now + foreign_s * rank / foreign for rank in range(1, foreign + 1)]
                ends += [now] * min(worker.slots.free_slots, 1 << 10)
        ends.sort()
        return ends

    def _update_totals(self, worker: WorkerState, now: float) -> None:
        slots, live = worker.slots, worker.live and worker.decodes
        before = slots.free_slots
        slots.free_slots = free = slots.count_free_slots(self._mean_kv_tokens, now) if live else 0
        self.free_slots += free - before
        full = live and not free
        if full or not before:
            self._set_full(worker, full=full)
        if len(self._forecast.ends) <= MAX_UNCACHED_ENDS:
            self._forecast.made_at_s = NEVER
            self._label_forecasts.clear()

    def _set_full(self, worker: WorkerState, *, full: bool) -> None:
        """Add a worker to the full ones or remove it, and its instance with the last rank."""
        if full == (worker.name in self.full_workers):
            return
        names = {worker.name}
        if worker.rank is not None:
            ranks = self._states.ranks_of(worker.instance.id)
            others = {each.name for each in ranks if each.live} - names
            if not full or others <= self.full_workers:
                names.add(worker.instance.id)
        self.full_workers = self.full_workers | names if full else self.full_workers - names
