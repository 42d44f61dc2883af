"""The router's models of all workers."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.core.values import Load
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.data_parallel import engine_info, list_workers, split_load
from dynamo.scheduling.workers.latency_model import WorkerLatencyModel
from dynamo.scheduling.workers.tier_queues import TierQueues
from dynamo.scheduling.workers.worker import WorkerState

REFRESHES_PER_CALL = 16
"""Workers refreshed by one call, so that a decision over hundreds of workers stays fast."""


class WorkerStates:
    """The states of all workers in order of announcement. An instance with data-parallel ranks has
    one state for each rank, named "instance/rank" as in its events. Workers with the same engine
    and step size share one latency model. `workers` is a new list after each change of the set;
    `changed` holds the workers that changed since its reader last cleared it."""

    def __init__(self) -> None:
        self.workers: list[WorkerState] = []
        self.changed: set[WorkerState] = set()
        self._by_name: dict[str, WorkerState] = {}
        self._latency_models: dict[tuple[str, int], WorkerLatencyModel] = {}
        self._next = 0

    def __getitem__(self, name: str) -> WorkerState:
        return self._by_name[name]

    def get(self, name: str) -> WorkerState | None:
        """Return the state of a worker, or None if the worker is not known."""
        return self._by_name.get(name)

    @property
    def cacheless(self) -> set[str]:
        """The names of workers without a prefix cache."""
        return {
            worker.name
            for worker in self.workers
            if worker.engine_info and not worker.engine_info.prefix_caching
        }

    def refresh_next(self, now: float) -> None:
        """Refresh all workers, or the next REFRESHES_PER_CALL in turn."""
        workers = self.workers
        if len(workers) <= REFRESHES_PER_CALL:
            for worker in workers:
                worker.refresh(now)
            return
        for _ in range(REFRESHES_PER_CALL):
            self._next = (self._next + 1) % len(workers)
            workers[self._next].refresh(now)

    def update_instances(self, instances: Mapping[str, Instance]) -> list[str]:
        """Replace the set of workers. Return the names of the removed ones."""
        live = list_workers(instances)
        removed = [name for name in self._by_name if name not in live]
        for name in removed:
            del self._by_name[name]
        for name, (instance, rank) in live.items():
            worker = self._by_name.get(name)
            if worker is None:
                info = engine_info(instance)
                key = (info.engine, info.max_num_batched_tokens) if info else ("", 0)
                model = self._latency_models.setdefault(key, WorkerLatencyModel())
                self._by_name[name] = WorkerState(name, instance, model, self.changed, rank)
            elif worker.instance is not instance:
                worker.update_instance(instance)
        self.workers = list(self._by_name.values())
        self.changed.intersection_update(self.workers)
        return removed

    def on_load_report(self, name: str, load: Load, now: float) -> None:
        """Pass a load report to the worker's state, or to the state of each of its ranks."""
        for worker_name, part in split_load(name, load).items():
            if (worker := self._by_name.get(worker_name)) is not None:
                worker.on_load_report(part)
                if part.tiers or worker.tier_queues is not None:
                    worker.tier_queues = worker.tier_queues or TierQueues()
                    worker.tier_queues.update(part.tiers, now)
