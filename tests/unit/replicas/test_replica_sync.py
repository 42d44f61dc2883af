"""Routers in step over the event plane: books agree, whoever joins, dies or misses events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from dynamo.communication.discovery import open_discovery
from dynamo.communication.events.memory import MemoryEvents
from dynamo.core.clock import SystemClock
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.costs.block_cost import BlockCost
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.replicas.peer_requests import PeerRequests
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerStates

SUBJECT = "dynamo.router/tiny"
WORKERS = {
    name: Instance(name, f"tcp://{name}", "dynamo", "worker", "generate") for name in ("w1", "w2")
}


class OneRouter:
    """A placement in step with others."""

    def __init__(self, name: str, plane: str) -> None:
        self.clock = SystemClock()
        self.plane = plane
        fleet = WorkerStates()
        fleet.update_instances(WORKERS)
        self.placement = PlacementSolver(
            fleet, CacheView(self.clock), PredictedCost(), Random(name)
        )
        self.looked = 0
        self.follower = PeerRequests(self.placement, self.clock, self._look)
        self.replicas = ReplicaSync(self.clock, name, self.follower)

    async def start(self) -> None:
        self.events = await MemoryEvents.open(
            f"memory:{self.plane}", await open_discovery(f"memory:{self.plane}")
        )
        await self.replicas.start(self.events, SUBJECT)

    async def close(self) -> None:
        await self.replicas.close()
        await self.events.close()

    async def die(self) -> None:
        """Gone without a word of its own."""
        await self.events.close()

    def send(self, name: str, tokens: int = 100, text: str = "") -> PlacedRequest:
        """`text`: equal ones are equal prompts (default: the name)."""
        now = self.clock.now()
        prompt = Prompt(tokens, [hash((text or name, at)) & 0xFFFF for at in range(tokens // 16)])
        arrival = PendingRequest(name, prompt, 16, now)
        self.placement.submit(arrival)
        (placed,) = self.placement.place(now)
        self.replicas.publish_routed(placed.placed.worker.name, placed.placed)
        return placed.placed

    def first_token(self, active: PlacedRequest, emitted: int = 1) -> None:
        active.emitted = emitted
        self.placement.on_first_token(active, self.clock.now())
        self.replicas.publish_first_token(active.id)

    def end(self, active: PlacedRequest) -> None:
        self.placement.on_ended(active, self.clock.now())
        self.replicas.publish_ended(active.id)

    def seen(self) -> dict[str, list[tuple[int, int, bool]]]:
        return {
            book.name: sorted(
                (one.prompt_tokens, one.emitted, one.first_token_s is not None)
                for one in book.active.values()
            )
            for book in self.placement.worker_states.workers
        }

    def open_tokens(self) -> list[int]:
        return [book.pending_prefill_tokens for book in self.placement.worker_states.workers]

    def decode_blocks(self, tokens: int) -> list[float]:
        """Of each worker, were a prompt like nobody's to go there."""
        cost, now = self.placement.cost, self.clock.now()
        arrival = PendingRequest(
            "x", Prompt(tokens, range(1 << 40, (1 << 40) + tokens // 16)), 16, now
        )
        books = self.placement.worker_states.workers
        return [cost.terms(arrival, book, now)["decode_blocks"] for book in books]

    def _look(self) -> None:
        self.looked += 1


Begin = Callable[..., Any]


@pytest.fixture
async def begin(request: pytest.FixtureRequest) -> AsyncIterator[Begin]:
    async with AsyncExitStack() as running:

        async def one(name: str) -> OneRouter:
            made = OneRouter(name, request.node.name)
            await made.start()
            running.push_async_callback(made.close)
            return made

        yield one


async def quiet() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_one_sends_stands_in_the_others_books(begin: Begin) -> None:
    one, other = await begin("one"), await begin("other")
    await quiet()
    first, second = one.send("a", 160), other.send("b", 320)
    await quiet()
    assert one.seen() == other.seen()
    assert one.open_tokens() == other.open_tokens()
    assert sum(one.open_tokens()) == 480

    one.first_token(first, emitted=3)
    await quiet()
    assert sum(other.open_tokens()) == 320
    assert other.looked
    one.end(first)
    other.end(second)
    await quiet()
    assert one.seen() == other.seen() == {"w1": [], "w2": []}
    assert other.open_tokens() == [0, 0]


async def test_a_prompt_sent_by_one_is_a_hit_to_the_other(begin: Begin) -> None:
    one, other = await begin("one"), await begin("other")
    await quiet()
    active = one.send("a", 160)
    await quiet()
    assert other.placement.view.find_overlaps(active.hashes) == one.placement.view.find_overlaps(
        active.hashes
    )


async def test_blocks_in_use_count_whoever_sent_them(begin: Begin) -> None:
    one, other = await begin("one"), await begin("other")
    one.placement.cost, other.placement.cost = BlockCost(), BlockCost()
    await quiet()
    first, second = one.send("a", 160, "t"), one.send("b", 160, "t")
    await quiet()
    assert other.decode_blocks(160) == one.decode_blocks(160)
    one.end(second)
    await quiet()
    assert other.decode_blocks(160) == one.decode_blocks(160)
    own = other.send("c", 160, "t")
    await quiet()
    one.end(first)
    await quiet()
    assert other.decode_blocks(160) == one.decode_blocks(160)
    assert sorted(one.decode_blocks(160)) == [10, 20]
    other.end(own)
    await quiet()
    assert other.decode_blocks(160) == one.decode_blocks(160) == [10, 10]


async def test_a_router_that_joins_catches_up(begin: Begin) -> None:
    one = await begin("one")
    active = one.send("a", 160)
    one.first_token(active, emitted=5)
    one.send("b", 320)
    ended = one.send("c", 48)
    one.end(ended)
    late = await begin("late")
    await quiet()
    assert late.seen() == one.seen()
    assert sorted(late.open_tokens()) == sorted(one.open_tokens())
    one.end(active)
    await quiet()
    assert late.seen() == one.seen()


async def test_who_dies_is_forgotten_and_nobody_else(begin: Begin) -> None:
    one, other = await begin("one"), await begin("other")
    await quiet()
    kept = one.send("a", 160)
    other.send("b", 320)
    await quiet()
    await other.die()
    await quiet()
    assert sum(map(len, one.seen().values())) == 1
    assert sorted(one.open_tokens()) == [0, 160]
    assert one.replicas.peers == set()
    one.end(kept)
    assert one.open_tokens() == [0, 0]

    third = await begin("third")
    again = one.send("c", 64)
    await quiet()
    assert third.seen() == one.seen()
    one.end(again)


async def test_lost_events_are_repaired(begin: Begin) -> None:
    one, other = await begin("one"), await begin("other")
    await quiet()
    other.events.lossy = lambda first: first % 2 == 1
    sent = [one.send(str(number), 16 * (1 + number)) for number in range(6)]
    for active in sent[:3]:
        await quiet()
        one.first_token(active)
        await quiet()
        one.end(active)
    await quiet()
    other.events.lossy = None
    last = one.send("last", 16)
    await quiet()
    assert other.seen() == one.seen()
    assert other.open_tokens() == one.open_tokens()
    one.end(last)


async def test_a_promised_place_is_not_booked_twice(begin: Begin) -> None:
    server, frontend = await begin("server"), await begin("frontend")
    await quiet()
    arrival = PendingRequest("a", Prompt(160, list(range(10))), 16, server.clock.now())
    server.placement.submit(arrival)
    (placed,) = server.placement.place(server.clock.now())
    server.follower.reserve(placed.placed)
    frontend.replicas.publish_routed(placed.placed.worker.name, placed.placed)
    await quiet()
    assert sum(server.open_tokens()) == 160
    assert server.follower.reserved_count == 0
    frontend.replicas.publish_ended("a")
    await quiet()
    assert server.open_tokens() == [0, 0]


async def test_a_promised_place_that_nobody_takes_is_given_back(begin: Begin) -> None:
    server = await begin("server")
    for _ in range(2):
        arrival = PendingRequest("a", Prompt(160, list(range(10))), 16, server.clock.now())
        server.placement.submit(arrival)
        (placed,) = server.placement.place(server.clock.now())
        server.follower.reserve(placed.placed)
    assert sum(server.open_tokens()) == 160
    server.follower.expire_reservations(server.clock.now() + 1)
    assert server.open_tokens() == [0, 0]
    assert server.follower.reserved_count == 0
