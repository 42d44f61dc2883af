"""What the view of caches counts, forgets, and asks of another index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tests.unit.index.conftest import HandClock, chain

from dynamo.communication.events import Event
from dynamo.core.kv_events import encode_kv_events
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.cache_view import MAX_REMOTE_MATCHES

BLOCKS = chain(1, 6)


@pytest.fixture
def view(clock: HandClock) -> CacheView:
    return CacheView(clock, ttl_s=60.0)


def told(worker: str, kind: str = "event", *changes: KvEvent) -> Event:
    payload = encode_kv_events(changes) if changes else b""
    return Event("ns.worker.kv_events", worker, 1, 1, payload, kind)  # type: ignore[arg-type]


def test_what_is_heard_is_counted(view: CacheView) -> None:
    view.on_event(told("a", "dump", BlocksStored(0, tuple(BLOCKS))))
    view.on_event(told("a", "event", BlocksRemoved(tuple(BLOCKS[4:]))))
    view.on_event(told("a", "event", BlocksCleared(), BlocksStored(0, (BLOCKS[0],))))
    view.on_event(Event("ns.worker.kv_events", "a", 1, 1, b"?", "event"))
    view.on_event(Event("ns.worker.load", "a", 1, 1, b"?", "event"))
    assert dict(view.event_counts) == {
        "dump": 1,
        "event": 3,
        "stored": 7,
        "removed": 2,
        "cleared": 1,
        "undecodable": 1,
    }


def test_a_worker_that_comes_again_is_not_blamed_for_what_was_not_understood(
    view: CacheView,
) -> None:
    view.on_event(Event("ns.worker.kv_events", "a", 1, 1, b"?", "event"))
    view.on_event(told("a", "event", BlocksStored(0, tuple(BLOCKS))))
    assert view.get_mode("a") == "stale"
    view.on_event(told("a", "gone"))
    view.on_event(told("a", "event", BlocksStored(0, tuple(BLOCKS))))
    assert view.get_mode("a") == "exact"


def test_one_that_says_that_it_keeps_nothing_is_believed_at_once(view: CacheView) -> None:
    view.on_event(told("a", "dump", BlocksStored(0, tuple(BLOCKS))))
    view.on_request_routed("a", chain(2, 6))
    view.on_request_routed("b", chain(2, 6))
    view.set_cacheless_workers({"a"})
    assert (view.find_overlaps(BLOCKS), view.find_overlaps(chain(2, 6))) == ({}, {"b": 6})
    view.set_cacheless_workers(set())
    view.on_request_routed("a", BLOCKS)
    assert view.find_overlaps(BLOCKS) == {"a": 6}


class OtherIndex:
    """Holds what it is given, of a worker "a"."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def match(self, hashes: Sequence[int]) -> Mapping[str, int]:
        self.asked.append(hashes[-1])
        return {"a": len(hashes) - 1}


async def test_another_index_is_asked_for_every_prompt_and_few_answers_are_kept(
    view: CacheView,
) -> None:
    await view.fetch_remote_match(BLOCKS)
    other = OtherIndex()
    assert not view.is_remote
    view.use_remote_index(other.match)
    assert view.is_remote
    view.on_event(told("b", "dump", BlocksStored(0, tuple(BLOCKS))))
    await view.fetch_remote_match([])
    assert (other.asked, view.find_overlaps([]), view.find_overlaps(BLOCKS)) == ([], {}, {})
    await view.fetch_remote_match(BLOCKS)
    view.on_request_routed("c", BLOCKS[:2])
    assert view.find_overlaps(BLOCKS) == {"a": 5, "c": 2}
    for number in range(MAX_REMOTE_MATCHES):
        await view.fetch_remote_match([number, -1 - number])
    assert view.find_overlaps([0, -1]) == {"a": 1}
    assert view.find_overlaps(BLOCKS) == {"c": 2}


async def test_the_answers_kept_are_the_newest(view: CacheView) -> None:
    view.use_remote_index(OtherIndex().match)
    await view.fetch_remote_match(BLOCKS)
    for number in range(MAX_REMOTE_MATCHES - 1):
        await view.fetch_remote_match([number, -1 - number])
    await view.fetch_remote_match(BLOCKS)
    await view.fetch_remote_match([1, 2, 3])
    assert view.find_overlaps(BLOCKS) == {"a": 5}


class Plane:
    """An event plane with one listener."""

    def __init__(self) -> None:
        self.hear: Callable[[Event], None] | None = None

    def count_lost_events(self) -> int:
        return 7

    async def subscribe(self, prefix: str, callback: Callable[[Event], None]) -> Callable[[], None]:
        self.hear = callback
        return self.leave

    def leave(self) -> None:
        self.hear = None


async def test_a_closed_view_hears_no_more(view: CacheView) -> None:
    plane: Any = Plane()
    await view.subscribe(plane, "ns.")
    assert view.count_lost_events() == 7
    plane.hear(told("a", "dump", BlocksStored(0, tuple(BLOCKS))))
    plane.hear(told("a", "event", BlocksRemoved(tuple(BLOCKS[4:]))))
    await asyncio.sleep(0)
    assert view.find_overlaps(BLOCKS) == {"a": 4}
    plane.hear(told("b", "dump", BlocksStored(0, tuple(BLOCKS))))
    view.close()
    await asyncio.sleep(0)
    assert view.find_overlaps(BLOCKS) == {"a": 4}
    assert plane.hear is None
