"""The workers of a model, by name and by instance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dynamo.core.kv_events import worker_name
from dynamo.core.values import Load
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.latency_model import WorkerLatencyModel
from dynamo.scheduling.workers.tier_queues import TierQueues
from dynamo.scheduling.workers.worker import WorkerState, engine_info

REFRESHES_PER_CALL = 16
"""Workers refreshed by one call, so that a decision over hundreds of workers stays fast."""


NO_RANKS = (None,)


def data_parallel_ranks(instance: Instance) -> Sequence[int | None]:
    """Return the ranks of the instance; a single None for an instance without ranks."""
    capability = instance.capabilities.get("engine")
    ranks = capability.get("data_parallel", 1) if isinstance(capability, dict) else 1
    return range(ranks) if ranks > 1 else NO_RANKS


class WorkerStates:
    """The states of all workers in order of announcement. An instance with data-parallel ranks has
    one state for each rank, named "instance/rank" as in its events. Workers with the same engine
    and step size share one latency model. `workers` is a new list after each change of the set;
    `changed` holds the workers that changed since its reader last cleared it. `refreshes_per_call`:
    workers that one call refreshes where there are more.

    A worker that is gone stays known while requests are there: a worker that was ejected comes back
    with them.
    """

    def __init__(self) -> None:
        self.workers: list[WorkerState] = []
        self.refreshes_per_call = REFRESHES_PER_CALL
        self.changed: set[WorkerState] = set()
        self._by_name: dict[str, WorkerState] = {}
        self._by_instance: dict[str, list[WorkerState]] = {}
        self._gone: dict[str, WorkerState] = {}
        self._latency_models: dict[tuple[str, int], WorkerLatencyModel] = {}
        self._next = 0

    def __getitem__(self, name: str) -> WorkerState:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> WorkerState | None:
        """Return the state of a worker that may be chosen, or None if the worker is not known."""
        return self._by_name.get(name)

    def at(self, instance: Instance, rank: int | None) -> WorkerState:
        """Return the state of a rank of an instance, which may be gone or not known yet."""
        for worker in self._by_instance.get(instance.id, ()):
            if worker.rank == rank:
                return worker
        worker = self._make(worker_name(instance.id, rank), instance, rank)
        self._gone[worker.name] = worker
        self._by_instance.setdefault(instance.id, []).append(worker)
        return worker

    def count(self, instance: str) -> int:
        """Return how many requests of this process an instance answers, or will answer, or
        computes the prompts of."""
        return sum(
            [
                worker.slots.occupied + worker.prompts
                for worker in self._by_instance.get(instance, ())
            ]
        )

    def ranks_of(self, instance: str) -> Sequence[WorkerState]:
        """Return the workers of an instance, also of one that is gone while requests are there."""
        return self._by_instance.get(instance, ())

    def all(self) -> Iterator[WorkerState]:
        """Iterate over the workers, also over those that are gone."""
        return (worker for ranks in self._by_instance.values() for worker in ranks)

    @property
    def cacheless(self) -> set[str]:
        """The names of workers without a prefix cache."""
        return {
            worker.name
            for worker in self.workers
            if worker.engine_info and not worker.engine_info.prefix_caching
        }

    def refresh_next(self, now: float) -> None:
        """Refresh all workers, or the next `refreshes_per_call` in turn."""
        workers = self.workers
        if len(workers) <= REFRESHES_PER_CALL:
            for worker in workers:
                worker.refresh(now)
            return
        for _ in range(self.refreshes_per_call):
            self._next = (self._next + 1) % len(workers)
            workers[self._next].refresh(now)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        """Replace the set of workers that may be chosen."""
        live = {
            worker_name(name, rank): (instance, rank)
            for name, instance in instances.items()
            for rank in data_parallel_ranks(instance)
        }
        for name in [name for name in self._by_name if name not in live]:
            worker = self._gone[name] = self._by_name.pop(name)
            worker.live = False
            self.forget(worker)
        for name, (instance, rank) in live.items():
            known = self._by_name.get(name) or self._gone.pop(name, None)
            worker = known or self._make(name, instance, rank)
            if known is None:
                self._by_instance.setdefault(instance.id, []).append(worker)
            elif worker.instance is not instance:
                worker.update_instance(instance)
            self._by_name[name], worker.live = worker, True
        self.workers = list(self._by_name.values())
        self.changed.intersection_update(self.workers)

    def forget(self, worker: WorkerState) -> None:
        """Forget a worker that is gone, if no request is there any more."""
        if worker.live or worker.active or worker.arriving:
            return
        if self._gone.pop(worker.name, None) is not None:
            ranks = self._by_instance[worker.instance.id]
            ranks.remove(worker)
            if not ranks:
                del self._by_instance[worker.instance.id]

    def split_load(self, instance: str, load: Load) -> Iterator[tuple[WorkerState, Load]]:
        """Yield the workers of an instance that reports `load`, each with its part."""
        parts: dict[int | None, Load] = {None: load}
        if len(load.ranks) > 1:
            parts = dict(enumerate(load.ranks))
        for worker in self._by_instance.get(instance, ()):
            if worker.live and worker.rank in parts:
                yield worker, parts[worker.rank]

    def on_load_report(self, name: str, load: Load, now: float) -> None:
        """Pass a load report to the worker's state, or to the state of each of its ranks."""
        for worker, part in self.split_load(name, load):
            worker.on_load_report(part)
            if part.tiers or worker.tier_queues is not None:
                worker.tier_queues = worker.tier_queues or TierQueues()
                worker.tier_queues.update(part.tiers, now)

    def _make(self, name: str, instance: Instance, rank: int | None) -> WorkerState:
        info = engine_info(instance)
        key = (info.engine, info.max_num_batched_tokens) if info else ("", 0)
        model = self._latency_models.setdefault(key, WorkerLatencyModel())
        return WorkerState(name, instance, model, self.changed, rank)
