"""Checks at the end of a chaos run: what must be empty, equal or complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle

from tests.simulation.chaos.processes import SimulatedFrontend, SimulatedWorker
from tests.support.invariants import check_ledger, check_pool, check_slots

from dynamo.communication import memory_transport
from dynamo.communication.events.records import KEY_ROOT, parse_key
from dynamo.communication.transfer import memory as transfer_places
from dynamo.core.context import Context
from dynamo.core.reply import Reply
from dynamo.core.values import BlocksStored, GenerateRequest
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.workers.ledger import Ledger

REQUEST_GAUGES = ("dynamo_admission_waiting_requests", "dynamo_router_waiting_requests")


class PlaceCount:
    """Compares the requests that admissions count with those in progress, and each ledger with its
    workers, at every instant.

    `excess` is the most by which admissions counted more.
    """

    def __init__(self, frontends: Sequence[SimulatedFrontend]) -> None:
        self.excess = 0
        self._frontends = frontends
        self._turns = cycle(frontends)
        self._in_progress = 0

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Send a request through the next frontend."""
        self._in_progress += 1
        try:
            await next(self._turns).pipeline.send(request, context, reply)
        finally:
            self._in_progress -= 1

    def check(self) -> None:
        """Compare now. No task may be runnable."""
        counts = [sum(front.pipeline.admission.count_requests()) for front in self._frontends]
        self.excess = max(self.excess, sum(counts) - self._in_progress)
        for front in self._frontends:
            check_ledger(front.pipeline.ledger)


def find_leaks(frontend: SimulatedFrontend, workers: Iterable[SimulatedWorker]) -> list[str]:
    """Describe everything that is left over after the last request."""
    alive = {worker.name: worker for worker in workers}
    engines = {name: engine for worker in alive.values() for name, engine in worker.engines.items()}
    leaks = [leak for name, engine in engines.items() for leak in _engine_leaks(name, engine)]
    leaks += _client_leaks(frontend, alive)
    leaks += _admission_leaks(frontend)
    leaks += _policy_leaks(frontend.pipeline.policy)
    leaks += _ledger_leaks(frontend.pipeline.ledger)
    if (view := frontend.pipeline.cache_view) is not None:
        leaks += _index_mismatches(view, engines)
    return leaks


def _engine_leaks(name: str, engine: BatchedEngine) -> Iterator[str]:
    scheduler = engine.scheduler
    try:
        check_pool(scheduler.pool)
        for tier in engine.tiers.tiers:
            if isinstance(tier, MemoryTier):
                check_slots(tier.slots)
    except AssertionError as error:
        yield f"{name}: {error}"
    if scheduler.pool.active:
        yield f"{name}: {scheduler.pool.active} blocks in use"
    if count := len(scheduler.running) + len(scheduler.waiting) + len(scheduler.arriving):
        yield f"{name}: {count} sequences in its batch"


def _admission_leaks(frontend: SimulatedFrontend) -> Iterator[str]:
    counts = frontend.pipeline.admission.count_requests()
    if any(counts):
        yield f"admission: {counts[0]} queued, {counts[1]} on their way, {counts[2]} at workers"
    for line in frontend.runtime.metrics.render().splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in REQUEST_GAUGES and float(value):
            yield f"the gauge {name} is {value}"


def _client_leaks(
    frontend: SimulatedFrontend, alive: Mapping[str, SimulatedWorker]
) -> Iterator[str]:
    client, prefill_client = frontend.pipeline.client, frontend.pipeline.prefill_client
    instances = client.instances.keys() | prefill_client.instances.keys()
    if instances != set(alive):
        differences = sorted(instances ^ set(alive))
        yield f"the client's instances are not the running workers: {differences[:5]}"
    busy_instances = [*client.busy_instances(), *prefill_client.busy_instances()]
    if busy := [instance.id for instance in busy_instances]:
        yield f"calls in progress at {busy[:5]}"


def _policy_leaks(policy: Policy) -> Iterator[str]:
    if policy.waiting:
        yield f"{policy.waiting} requests wait in the router"


def _ledger_leaks(ledger: Ledger) -> Iterator[str]:
    if ledger.requests or any(ledger.peers.values()):
        yield f"the ledger has {len(ledger.requests)} requests, peers {dict(ledger.peers)}"
    for worker in ledger.workers.all():
        if not worker.live:
            yield f"the ledger knows {worker.name}, which is gone"
        counts = worker.slots.occupied, worker.prompts, worker.arriving_tokens
        prefills, tokens = worker.pending_prefills, worker.pending_prefill_tokens
        if any(counts) or worker.active or prefills or tokens or worker.decode_context_tokens:
            yield (
                f"the state of {worker.name}: {len(worker.active)} requests, {prefills} prefills "
                f"({tokens} tokens), context {worker.decode_context_tokens}, {counts}"
            )


def _index_mismatches(view: CacheView, alive: Mapping[str, BatchedEngine]) -> Iterator[str]:
    if dead := set(view.get_modes()) - set(alive):
        yield f"the index knows dead workers: {sorted(dead)[:5]}"
    if inexact := [name for name in alive if view.get_mode(name) != "exact"]:
        yield f"{len(inexact)} workers' caches are not known exactly"
    indexed: dict[str, set[int]] = {name: set() for name in alive}
    for _, hashes, holders in view.device_index.copy():
        for name, depth in holders.items():
            indexed.setdefault(name, set()).update(hashes[:depth])
    for name, blocks in indexed.items():
        cached = cached_hashes(alive[name]) if name in alive else set()
        if blocks != cached:
            yield (
                f"the index of {name}: {len(blocks - cached)} blocks too many, "
                f"{len(cached - blocks)} too few, of {len(cached)}"
            )


def cached_hashes(engine: BatchedEngine) -> set[int]:
    """Return the hashes of the blocks in an engine's cache, without its tiers."""
    events = engine.scheduler.pool.dump_events()
    return {h for event in events if isinstance(event, BlocksStored) for h in event.hashes}


async def find_leaked_records(
    frontends: Sequence[SimulatedFrontend], workers: Iterable[SimulatedWorker]
) -> list[str]:
    """Describe discovery records of dead workers, and missing records of running ones."""
    discovery = frontends[0].runtime.discovery
    keys = list(await discovery.get("/"))
    counts = Counter(key.rsplit("/", 1)[-1] for key in keys if not key.startswith(KEY_ROOT))
    publishers = [parse_key(key).publisher for key in keys if key.startswith(KEY_ROOT)]
    routers = {frontend.runtime.instance_id for frontend in frontends}
    names = {worker.name for worker in workers}
    for router in routers:
        counts.pop(router, None)
    expected = max(counts.values(), default=0)
    leaks = [f"{counts[name]} records of the dead {name}" for name in counts.keys() - names]
    leaks += [
        f"an event source of the dead {publisher}"
        for publisher in publishers
        if publisher.partition("/")[0] not in names | routers
    ]
    incomplete = [name for name in names if counts[name] != expected]
    return leaks + [f"{counts[name]} of {expected} records of {name}" for name in incomplete]


def open_planes() -> Counter[str]:
    """Count the memory planes of this process that are not closed, by kind."""
    return Counter(
        {
            "listening planes": len(memory_transport._listening),
            "transfer planes": len(transfer_places._planes),
        }
    )
