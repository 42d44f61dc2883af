"""What must be empty, equal or whole when a day is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from dynamo.communication.events import memory as event_places
from dynamo.communication.requests import memory as request_places
from dynamo.core.values import BlocksStored
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.kv import KvPolicy
from dynamo.testing.day.processes import SimulatedFrontend, SimulatedWorker


def leaks(frontend: SimulatedFrontend, workers: Iterable[SimulatedWorker]) -> list[str]:
    """In words, everything that is left over, once nothing is asked any more."""
    alive = {worker.name: worker for worker in workers}
    found = [problem for worker in alive.values() for problem in _of_engine(worker)]
    found += _of_client(frontend, alive)
    if (policy := frontend.policy) is not None:
        found += _of_policy(policy, alive)
    return found


def _of_engine(worker: SimulatedWorker) -> Iterator[str]:
    scheduler = worker.engine.scheduler
    try:
        scheduler.pool.check()
    except AssertionError as error:
        yield f"{worker.name}: {error}"
    if scheduler.pool.active:
        yield f"{worker.name}: {scheduler.pool.active} blocks in use"
    if left := len(scheduler.running) + len(scheduler.waiting):
        yield f"{worker.name}: {left} sequences in its batch"


def _of_client(frontend: SimulatedFrontend, alive: Mapping[str, SimulatedWorker]) -> Iterator[str]:
    client = frontend.way.client
    if set(client.instances) != set(alive):
        yield f"not the workers that live: {sorted(set(client.instances) ^ set(alive))[:5]}"
    if busy := [one.id for one in client.busy()]:
        yield f"calls under way at {busy[:5]}"


def _of_policy(policy: KvPolicy, alive: Mapping[str, SimulatedWorker]) -> Iterator[str]:
    placement = policy.placement
    if len(placement):
        yield f"{len(placement)} requests wait in the router"
    for book in placement.fleet.books:
        if book.active or book.open_count or book.open_tokens or book.context:
            yield (
                f"the router's book of {book.name}: {len(book.active)} active, "
                f"{book.open_count} open ({book.open_tokens} tokens), context {book.context}"
            )
    yield from _of_index(cast("CacheView", placement.view), alive)


def _of_index(view: CacheView, alive: Mapping[str, SimulatedWorker]) -> Iterator[str]:
    if strangers := set(view.modes()) - set(alive):
        yield f"the index knows dead workers: {sorted(strangers)[:5]}"
    if inexact := [name for name in alive if view.mode(name) != "exact"]:
        yield f"{len(inexact)} workers' caches are not known exactly"
    known: dict[str, set[int]] = {name: set() for name in alive}
    for _, hashes, holders in view.index.chains():
        for name, depth in holders.items():
            known.setdefault(name, set()).update(hashes[:depth])
    for name, blocks in known.items():
        held = held_by(alive[name]) if name in alive else set()
        if blocks != held:
            yield (
                f"the index of {name}: {len(blocks - held)} blocks too many, "
                f"{len(held - blocks)} too few, of {len(held)}"
            )


def held_by(worker: SimulatedWorker) -> set[int]:
    """The blocks in its cache."""
    changes = worker.engine.held_blocks()
    return {one for change in changes if isinstance(change, BlocksStored) for one in change.hashes}


async def records_left(
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


def places_left() -> list[str]:
    """Memory planes that nobody closed."""
    counts = {
        "request planes": len(request_places._planes),  # noqa: SLF001 - their own register
        "event places": len(event_places._places),  # noqa: SLF001
    }
    return [f"{count} {name} left open" for name, count in counts.items() if count]
