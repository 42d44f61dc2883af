"""What must be empty, equal or whole when a day is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from dynamo.communication.events import memory as event_places
from dynamo.communication.requests import memory as request_places
from dynamo.core.values import BlocksStored
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.policies.kv import KvPolicy
from dynamo.testing.chaos.processes import SimulatedFrontend, SimulatedWorker


def find_leaks(frontend: SimulatedFrontend, workers: Iterable[SimulatedWorker]) -> list[str]:
    """In words, everything that is left over, once nothing is asked any more."""
    alive = {worker.name: worker for worker in workers}
    found = [problem for worker in alive.values() for problem in _engine_leaks(worker)]
    found += _client_leaks(frontend, alive)
    if (policy := frontend.policy) is not None:
        found += _policy_leaks(policy, alive)
    return found


def _engine_leaks(worker: SimulatedWorker) -> Iterator[str]:
    scheduler = worker.engine.scheduler
    try:
        scheduler.pool.check_invariants()
    except AssertionError as error:
        yield f"{worker.name}: {error}"
    if scheduler.pool.active:
        yield f"{worker.name}: {scheduler.pool.active} blocks in use"
    if left := len(scheduler.running) + len(scheduler.waiting):
        yield f"{worker.name}: {left} sequences in its batch"


def _client_leaks(
    frontend: SimulatedFrontend, alive: Mapping[str, SimulatedWorker]
) -> Iterator[str]:
    client = frontend.pipeline.client
    if set(client.instances) != set(alive):
        yield f"not the workers that live: {sorted(set(client.instances) ^ set(alive))[:5]}"
    if busy := [one.id for one in client.busy_instances()]:
        yield f"calls under way at {busy[:5]}"


def _policy_leaks(policy: KvPolicy, alive: Mapping[str, SimulatedWorker]) -> Iterator[str]:
    placement = policy.solver
    if len(placement):
        yield f"{len(placement)} requests wait in the router"
    for book in placement.worker_states.workers:
        if (
            book.active
            or book.pending_prefills
            or book.pending_prefill_tokens
            or book.decode_context_tokens
        ):
            yield (
                f"the router's book of {book.name}: {len(book.active)} active, "
                f"{book.pending_prefills} open ({book.pending_prefill_tokens} tokens), context {book.decode_context_tokens}"
            )
    yield from _index_mismatches(cast("CacheView", placement.view), alive)


def _index_mismatches(view: CacheView, alive: Mapping[str, SimulatedWorker]) -> Iterator[str]:
    if strangers := set(view.get_modes()) - set(alive):
        yield f"the index knows dead workers: {sorted(strangers)[:5]}"
    if inexact := [name for name in alive if view.get_mode(name) != "exact"]:
        yield f"{len(inexact)} workers' caches are not known exactly"
    known: dict[str, set[int]] = {name: set() for name in alive}
    for _, hashes, holders in view.device_index.iter_chains():
        for name, depth in holders.items():
            known.setdefault(name, set()).update(hashes[:depth])
    for name, blocks in known.items():
        held = cached_hashes(alive[name]) if name in alive else set()
        if blocks != held:
            yield (
                f"the index of {name}: {len(blocks - held)} blocks too many, "
                f"{len(held - blocks)} too few, of {len(held)}"
            )


def cached_hashes(worker: SimulatedWorker) -> set[int]:
    """The blocks in its cache."""
    changes = worker.engine.snapshot_kv_events()
    return {one for change in changes if isinstance(change, BlocksStored) for one in change.hashes}


async def find_leaked_records(
    frontends: Sequence[SimulatedFrontend], workers: Iterable[SimulatedWorker]
) -> list[str]:
    """Records in discovery of who is dead, and those that who lives has not."""
    discovery = frontends[0].runtime.discovery
    counts = Counter(key.rsplit("/", 1)[-1] for key in await discovery.get("/"))
    for frontend in frontends:
        counts.pop(frontend.runtime.instance_id, None)
    names = {worker.name for worker in workers}
    usual = max(counts.values(), default=0)
    found = [f"{counts[name]} records of {name}, who is dead" for name in counts.keys() - names]
    short = [name for name in names if counts[name] != usual]
    return found + [f"{counts[name]} of {usual} records of {name}" for name in short]


def find_open_planes() -> list[str]:
    """Memory planes that nobody closed."""
    counts = {
        "request planes": len(request_places._planes),  # noqa: SLF001 - their own register
        "event places": len(event_places._buses),  # noqa: SLF001
    }
    return [f"{count} {name} left open" for name, count in counts.items() if count]
