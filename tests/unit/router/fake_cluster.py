"""A placement solver over workers, prompts and cache contents that a test sets by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.index.tiered_index import LowerTierIndex, TierRuns
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.placement.solver import PlacementResult, PlacementSolver
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt

BLOCK = 16
ENGINE = {
    "engine": "mock",
    "block_tokens": BLOCK,
    "num_blocks": 4096,
    "context_tokens": 65_536,
    "max_num_seqs": 100,
    "max_num_batched_tokens": 8_192,
}


def instance(name: str, **capabilities: Any) -> Instance:
    return Instance(
        name, f"memory://{name}", "n", "worker", "generate", {"engine": ENGINE} | capabilities
    )


def place_all(solver: PlacementSolver, now: float) -> list[PlacementResult]:
    """Run one round in all its slices."""
    results = solver.place(now)
    while solver.unfinished:
        results += solver.place(now)
    return results


class FakeCacheView:
    """A CacheView over `caches`, which tests fill. A routed prompt is cached at once.

    `routes`: worker of each routed prompt, in order. `open_prefills`: prompts whose prefill has
    not ended. `lower`: the blocks below the devices."""

    def __init__(self) -> None:
        self.caches: dict[str, set[int]] = {}
        self.routes: list[str] = []
        self.open_prefills = 0
        self.lower = LowerTierIndex()

    @property
    def has_lower_tiers(self) -> bool:
        return self.lower.block_count > 0

    def find_runs(self, hashes: Sequence[int], overlaps: Mapping[str, int]) -> TierRuns:
        return self.lower.find_runs(hashes, overlaps)

    def find_overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        overlaps = {}
        for worker, cache in self.caches.items():
            count = 0
            while count < len(hashes) and hashes[count] in cache:
                count += 1
            if count:
                overlaps[worker] = count
        return overlaps

    def on_request_routed(self, worker: str, hashes: Sequence[int]) -> None:
        self.routes.append(worker)
        self.open_prefills += 1
        self.caches.setdefault(worker, set()).update(hashes)

    def on_prefill_ended(self, worker: str, hashes: Sequence[int]) -> None:
        self.open_prefills -= 1

    def get_mode(self, worker: str) -> str:
        return "exact"

    def set_cacheless_workers(self, workers: AbstractSet[str]) -> None:
        for worker in workers:
            self.caches[worker] = set()


class FakeCluster:
    """Workers a, b, c, ... with a solver over them. Tests move the clock `now` themselves."""

    def __init__(
        self, workers: int, cost: Cost | None = None, seed: int = 1, **options: Any
    ) -> None:
        self.now = 100.0
        clock: Any = SimpleNamespace(now=lambda: self.now)
        self.ledger = Ledger(clock)
        self.worker_states = self.ledger.workers
        self.names = [chr(ord("a") + number) for number in range(workers)]
        self.worker_states.update_instances({name: instance(name) for name in self.names})
        self.view = FakeCacheView()
        self.rng = Random(seed)
        self.solver = PlacementSolver(
            self.ledger,
            cast("CacheView", self.view),
            cost or PredictedCost(),
            self.rng,
            **options,
        )
        self._request_count = 0

    def make_request(
        self, tokens: int, hashes: Sequence[int] = (), **options: Any
    ) -> PendingRequest:
        self._request_count += 1
        name = f"r{self._request_count}"
        return PendingRequest(name, Prompt(tokens, hashes), BLOCK, self.now, **options)

    def submit(self, tokens: int, hashes: Sequence[int] = (), **options: Any) -> PendingRequest:
        request = self.make_request(tokens, hashes, **options)
        self.solver.submit(request)
        return request

    def place(self) -> dict[str, PlacedRequest]:
        """Run one round; return what it placed, by request id."""
        results = place_all(self.solver, self.now)
        return {result.request.id: result.placed for result in results}

    def route(self, tokens: int, hashes: Sequence[int] = (), **options: Any) -> str:
        """Submit and place one request; return its worker's name."""
        request = self.submit(tokens, hashes, **options)
        return self.place()[request.id].worker.name

    def add_prefill(self, name: str, tokens: int) -> PlacedRequest:
        """Place a prompt of `tokens` uncached tokens on the worker `name`."""
        self._request_count += 1
        worker, key = self.worker_states[name], f"busy{self._request_count}"
        placed = self.ledger.place(key, worker, Prompt(tokens, ()), new_tokens=tokens)
        self.view.routes.pop()
        return placed

    def first_token(self, placed: PlacedRequest, at_s: float | None = None) -> None:
        """Enter the first token of a request now, or at another time."""
        now, self.now = self.now, self.now if at_s is None else at_s
        self.ledger.first_token(placed)
        self.now = now

    def end(self, placed: PlacedRequest, at_s: float | None = None) -> None:
        """Enter the end of a request now, or at another time."""
        now, self.now = self.now, self.now if at_s is None else at_s
        self.ledger.end(placed, None)
        self.now = now
