"""Replica synchronisation: worker states agree after joins, deaths and lost events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from tests.support.invariants import check_ledger

from dynamo.communication.discovery import open_discovery
from dynamo.communication.events.memory import MemoryEvents
from dynamo.core.clock import SystemClock
from dynamo.core.values import BlocksStored, Load, TierLoad
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.costs.alternatives import BlockCost
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.prompt import Prompt

SUBJECT = "dynamo.router/tiny"
WORKERS = {
    name: Instance(name, f"tcp://{name}", "dynamo", "worker", "generate") for name in ("w1", "w2")
}


class FakeRouter:
    """A solver that is synchronised with other routers over memory planes."""

    def __init__(self, name: str, plane: str) -> None:
        self.clock = SystemClock()
        self.plane = plane
        self.ledger = Ledger(self.clock)
        self.ledger.workers.update_instances(WORKERS)
        view = CacheView(self.clock)
        self.solver = PlacementSolver(self.ledger, view, PredictedCost(), Random(name))
        self.change_count = 0
        self.loses_events = False
        self.ledger.on_first_token.append(self._on_change)
        self.replicas = ReplicaSync(self.clock, name, self.ledger, publish=name != "server")

    async def start(self) -> None:
        self.directory = await open_discovery(f"memory:{self.plane}")
        self.events = await MemoryEvents.open("memory:", self.directory)
        self.events.lossy = lambda first: self.loses_events and first % 2 == 1
        await self.replicas.start(self.events, SUBJECT)

    async def close(self) -> None:
        await self.replicas.close()
        await self.events.close()

    async def die(self) -> None:
        """Vanish without closing the source."""
        await self.events.close()

    def send(self, name: str, tokens: int = 100, text: str = "") -> PlacedRequest:
        """Place and publish a request. Equal `text` makes equal prompts (default: the name)."""
        now = self.clock.now()
        prompt = Prompt(tokens, [hash((text or name, at)) & 0xFFFF for at in range(tokens // 16)])
        request = PendingRequest(name, prompt, 16, now)
        self.solver.submit(request)
        (placed,) = self.solver.place(now)
        return placed.placed

    def first_token(self, placed: PlacedRequest, emitted: int = 1) -> None:
        placed.emitted = emitted
        self.ledger.first_token(placed)

    def end(self, placed: PlacedRequest) -> None:
        self.ledger.end(placed, None)
        check_ledger(self.ledger)

    def active_requests(self) -> dict[str, list[tuple[int, int, bool]]]:
        return {
            worker.name: sorted(
                (placed.prompt_tokens, placed.emitted, placed.first_token_s is not None)
                for placed in worker.active.values()
            )
            for worker in self.solver.worker_states.workers
        }

    def pending_tokens(self) -> list[int]:
        return [worker.pending_prefill_tokens for worker in self.solver.worker_states.workers]

    def decode_blocks(self, tokens: int) -> list[float]:
        """Return each worker's active blocks with an unrelated prompt added."""
        cost, now = self.solver.cost, self.clock.now()
        request = PendingRequest(
            "x", Prompt(tokens, range(1 << 40, (1 << 40) + tokens // 16)), 16, now
        )
        workers = self.solver.worker_states.workers
        return [cost.terms(request, worker, now)["decode_blocks"] for worker in workers]

    def _on_change(self, placed: PlacedRequest) -> None:
        self.change_count += 1


StartRouter = Callable[..., Any]


@pytest.fixture
async def start_router(request: pytest.FixtureRequest) -> AsyncIterator[StartRouter]:
    async with AsyncExitStack() as running:

        async def start(name: str) -> FakeRouter:
            router = FakeRouter(name, request.node.name)
            await router.start()
            running.push_async_callback(router.close)
            return router

        yield start


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_loads_from_memory_tiers_are_in_the_states_of_the_other(
    start_router: StartRouter,
) -> None:
    first_router, second_router = await start_router("one"), await start_router("other")
    await settle()
    now = first_router.clock.now()
    for worker in WORKERS:
        load = Load(tiers=(TierLoad("host", 1e-4),))
        first_router.solver.worker_states.on_load_report(worker, load, now)
        first_router.solver.view.apply(worker, [BlocksStored(0, range(1 << 16), "host")])  # type: ignore[arg-type]
    placed = first_router.send("loads", 16_000)
    await settle()
    (copy,) = second_router.solver.worker_states[placed.worker.name].active.values()
    assert copy.load_ms == placed.load_ms == pytest.approx(100.0)


async def test_requests_of_one_router_are_in_the_states_of_the_other(
    start_router: StartRouter,
) -> None:
    first_router, second_router = await start_router("one"), await start_router("other")
    await settle()
    first, second = first_router.send("a", 160), second_router.send("b", 320)
    await settle()
    assert first_router.active_requests() == second_router.active_requests()
    assert first_router.pending_tokens() == second_router.pending_tokens()
    assert sum(first_router.pending_tokens()) == 480

    first_router.first_token(first, emitted=3)
    await settle()
    assert sum(second_router.pending_tokens()) == 320
    assert second_router.change_count
    first_router.end(first)
    second_router.end(second)
    await settle()
    assert first_router.active_requests() == second_router.active_requests() == {"w1": [], "w2": []}
    assert second_router.pending_tokens() == [0, 0]


async def test_a_prompt_routed_by_one_router_is_an_overlap_for_the_other(
    start_router: StartRouter,
) -> None:
    first_router, second_router = await start_router("one"), await start_router("other")
    await settle()
    active = first_router.send("a", 160)
    await settle()
    assert second_router.solver.view.find_overlaps(
        active.hashes
    ) == first_router.solver.view.find_overlaps(active.hashes)


async def test_active_blocks_of_all_routers_count(start_router: StartRouter) -> None:
    first_router, second_router = await start_router("one"), await start_router("other")
    first_router.solver.cost, second_router.solver.cost = BlockCost(), BlockCost()
    await settle()
    first, second = first_router.send("a", 160, "t"), first_router.send("b", 160, "t")
    await settle()
    assert second_router.decode_blocks(160) == first_router.decode_blocks(160)
    first_router.end(second)
    await settle()
    assert second_router.decode_blocks(160) == first_router.decode_blocks(160)
    own = second_router.send("c", 160, "t")
    await settle()
    first_router.end(first)
    await settle()
    assert second_router.decode_blocks(160) == first_router.decode_blocks(160)
    assert sorted(first_router.decode_blocks(160)) == [10, 20]
    second_router.end(own)
    await settle()
    assert second_router.decode_blocks(160) == first_router.decode_blocks(160) == [10, 10]


async def test_a_new_router_receives_the_current_state(start_router: StartRouter) -> None:
    first_router = await start_router("one")
    active = first_router.send("a", 160)
    first_router.first_token(active, emitted=5)
    first_router.send("b", 320)
    ended = first_router.send("c", 48)
    first_router.end(ended)
    late = await start_router("late")
    await settle()
    assert late.active_requests() == first_router.active_requests()
    assert sorted(late.pending_tokens()) == sorted(first_router.pending_tokens())
    first_router.end(active)
    await settle()
    assert late.active_requests() == first_router.active_requests()


async def test_only_the_requests_of_a_dead_router_are_removed(start_router: StartRouter) -> None:
    first_router, second_router = await start_router("one"), await start_router("other")
    await settle()
    request = first_router.send("a", 160)
    second_router.send("b", 320)
    await settle()
    await second_router.die()
    await settle()
    assert sum(map(len, first_router.active_requests().values())) == 1
    assert sorted(first_router.pending_tokens()) == [0, 160]
    assert first_router.replicas.peers == set()
    first_router.end(request)
    assert first_router.pending_tokens() == [0, 0]

    third = await start_router("third")
    again = first_router.send("c", 64)
    await settle()
    assert third.active_requests() == first_router.active_requests()
    first_router.end(again)


async def test_lost_events_are_repaired(start_router: StartRouter) -> None:
    first_router, second_router = await start_router("one"), await start_router("other")
    await settle()
    second_router.loses_events = True
    sent = [first_router.send(str(number), 16 * (1 + number)) for number in range(6)]
    for active in sent[:3]:
        await settle()
        first_router.first_token(active)
        await settle()
        first_router.end(active)
    await settle()
    second_router.loses_events = False
    last = first_router.send("last", 16)
    await settle()
    assert second_router.active_requests() == first_router.active_requests()
    assert second_router.pending_tokens() == first_router.pending_tokens()
    first_router.end(last)


async def test_a_claimed_reservation_is_counted_once(start_router: StartRouter) -> None:
    server, frontend = await start_router("server"), await start_router("frontend")
    await settle()
    request = PendingRequest("a", Prompt(160, list(range(10))), 16, server.clock.now())
    server.solver.submit(request)
    (choice,) = server.solver.place(server.clock.now())
    worker = frontend.ledger.workers[choice.placed.worker.name]
    prompt = Prompt(160, list(range(10)))
    placed = frontend.ledger.place("a", worker, prompt, new_tokens=160)
    await settle()
    assert sum(server.pending_tokens()) == 160
    assert not server.ledger.requests
    check_ledger(server.ledger)
    frontend.end(placed)
    await settle()
    check_ledger(server.ledger)
    assert server.pending_tokens() == [0, 0]


async def test_an_unclaimed_reservation_expires(start_router: StartRouter) -> None:
    server = await start_router("server")
    for _ in range(2):
        request = PendingRequest("a", Prompt(160, list(range(10))), 16, server.clock.now())
        server.solver.submit(request)
        server.solver.place(server.clock.now())
    assert sum(server.pending_tokens()) == 160
    server.ledger.expire(server.clock.now() + 1)
    assert server.pending_tokens() == [0, 0]
    assert not server.ledger.requests


REPEATED_PAIRS = (
    (("w1", "w2"), ("w1", "w3")),
    (("w1", "w2"), ("w1", "w2"), ("w1", "w3")),
    (("w1", "w2"), ("w3", "w2")),
    (("w1", "w2"), ("w2", "w1")),
    (("w1", "w1"), ("w1", "w2"), ("w1", "w1")),
    (("w1", "w1"), ("w1", "w1")),
)


@pytest.mark.parametrize("pairs", REPEATED_PAIRS)
async def test_a_choice_made_again_replaces_the_one_before(
    start_router: StartRouter, pairs: Sequence[tuple[str, str]]
) -> None:
    server = await start_router("server")
    states, now = server.solver.worker_states, server.clock.now()
    names = ("w1", "w2", "w3")
    states.update_instances({n: Instance(n, f"tcp://{n}", "ns", "w", "generate") for n in names})
    workers = {worker.name: worker for worker in states.workers}
    for prefill, decode in pairs:
        prompt = Prompt(160, list(range(10)))
        server.ledger.place("a", workers[decode], prompt, workers[prefill], new_tokens=160)
        check_ledger(server.ledger)
        assert [len(w.active) for w in workers.values()] == [int(n == prefill) for n in names]
        expected = [int(n == decode != prefill) for n in names]
        assert [len(w.arriving) for w in workers.values()] == expected

    server.ledger.expire(now + 1)
    for worker in workers.values():
        assert not worker.active
        assert not worker.arriving
        counts = worker.pending_prefills, worker.pending_prefill_tokens, worker.arriving_tokens
        assert (*counts, worker.stall_sensitivity) == (0, 0, 0, 0.0)
