"""Loads of a prompt's blocks from the memory tiers below a worker's device.

A worker publishes how long each tier takes for a block, and the queue in front of the next load.
The router adds the loads of requests placed since. A block is loaded where that is quicker than
computing it. The overlap of a request with a worker then includes the block, and its prefill starts
after the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.index.tiered_index import ANY_WORKER, TierRun, TierRuns, skip_blocks
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.scheduling.workers.workers import WorkerStates


def plan_loads(request: PendingRequest, view: CacheView, states: WorkerStates, now: float) -> None:
    """Set `request.loads`, and extend `request.overlaps` by the blocks to load."""
    request.loads = loads = {}
    overlaps = request.overlaps
    runs_by_worker = view.find_runs(request.prompt.hashes, overlaps)
    if not runs_by_worker:
        return
    extended = dict(overlaps)
    for worker, runs in _runs_of_workers(runs_by_worker, overlaps, states):
        queues = worker.tier_queues
        if queues is None or not runs:
            continue
        compute_ms = worker.token_ms * request.block_tokens
        load = queues.choose(runs, compute_ms, now)
        if load is not None:
            loads[worker.name] = load
            extended[worker.name] = overlaps.get(worker.name, 0) + load.blocks
    request.overlaps = extended


def load_delay_ms(
    request: PendingRequest, worker: WorkerState, backlog_ms: float, now: float
) -> float:
    """Return how much longer than `backlog_ms` the prompt waits for its blocks at `worker`."""
    load = request.loads.get(worker.name)
    if load is None or worker.tier_queues is None:
        return 0.0
    return max(0.0, worker.tier_queues.load_ms(load, now) - backlog_ms)


def reserve_load(request: PendingRequest, worker: WorkerState, now: float) -> float:
    """Add the loads of a request that is sent to `worker` to its queues. Return their duration in
    milliseconds."""
    load = request.loads.get(worker.name)
    if load is None or worker.tier_queues is None:
        return 0.0
    return worker.tier_queues.reserve(load, now)


def _runs_of_workers(
    runs_by_worker: TierRuns, overlaps: Mapping[str, int], states: WorkerStates
) -> Iterable[tuple[WorkerState, Sequence[TierRun]]]:
    """Yield workers with the runs of a prompt that they can load."""
    others = runs_by_worker.get(ANY_WORKER)
    if others is None:
        for name, runs in runs_by_worker.items():
            if (worker := states.get(name)) is not None:
                yield worker, runs
        return
    for worker in states.workers:
        name = worker.name
        own = runs_by_worker.get(name)
        yield worker, own if own is not None else skip_blocks(others, overlaps.get(name, 0))
