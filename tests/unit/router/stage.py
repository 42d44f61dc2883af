"""Fleets, prompts and a view that are made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from random import Random
from typing import Any

from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerState, WorkerStates

BLOCK = 16
ENGINE = {
    "engine": "mock",
    "block_tokens": BLOCK,
    "num_blocks": 4096,
    "context_tokens": 65_536,
    "max_num_seqs": 100,
    "max_num_batched_tokens": 8_192,
}


def instance(name: str, **about: Any) -> Instance:
    return Instance(name, f"memory://{name}", "n", "worker", "generate", {"engine": ENGINE} | about)


class Held:
    """A view of caches that a test writes itself; routed prompts are held at once."""

    def __init__(self) -> None:
        self.caches: dict[str, set[int]] = {}
        self.routes: list[str] = []
        self.open = 0

    def overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        found = {}
        for worker, cache in self.caches.items():
            count = 0
            while count < len(hashes) and hashes[count] in cache:
                count += 1
            if count:
                found[worker] = count
        return found

    def routed(self, worker: str, hashes: Sequence[int]) -> None:
        self.routes.append(worker)
        self.open += 1
        self.caches.setdefault(worker, set()).update(hashes)

    def settled(self, worker: str, hashes: Sequence[int]) -> None:
        self.open -= 1

    def mode(self, worker: str) -> str:
        return "exact"

    def cacheless(self, workers: AbstractSet[str]) -> None:
        for worker in workers:
            self.caches[worker] = set()


class Stage:
    """Workers a, b, c, ... and a placement over them, with a clock of its own."""

    def __init__(self, workers: int, cost: Cost | None = None, seed: int = 1, **more: Any) -> None:
        self.fleet = WorkerStates()
        self.names = [chr(ord("a") + number) for number in range(workers)]
        self.fleet.update_instances({name: instance(name) for name in self.names})
        self.view = Held()
        self.rng = Random(seed)
        self.placement = PlacementSolver(
            self.fleet, self.view, cost or PredictedCost(), self.rng, **more
        )
        self.now = 100.0
        self._count = 0

    def arrival(self, tokens: int, hashes: Sequence[int] = (), **more: Any) -> PendingRequest:
        self._count += 1
        return PendingRequest(f"r{self._count}", Prompt(tokens, hashes), BLOCK, self.now, **more)

    def submit(self, tokens: int, hashes: Sequence[int] = (), **more: Any) -> PendingRequest:
        arrival = self.arrival(tokens, hashes, **more)
        self.placement.submit(arrival)
        return arrival

    def place(self) -> dict[str, PlacedRequest]:
        return {one.request.id: one.placed for one in self.placement.place(self.now)}

    def goes(self, tokens: int, hashes: Sequence[int] = (), **more: Any) -> str:
        arrival = self.submit(tokens, hashes, **more)
        return self.place()[arrival.id].worker.name

    def busy(self, name: str, tokens: int) -> PlacedRequest:
        """`tokens` of prompts are computed there."""
        book: WorkerState = self.fleet[name]
        self._count += 1
        active = PlacedRequest(f"busy{self._count}", book, Prompt(tokens, ()), tokens, self.now)
        book.place(active, self.now)
        return active
