"""CacheView: counters, removal, and a remote index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.unit.index.conftest import ManualClock, chain

from dynamo.communication.events import Event
from dynamo.core.kv_events import encode_kv_events
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.cache_view import MAX_REMOTE_MATCHES, IndexMatch

BLOCKS = chain(1, 6)


@pytest.fixture
def view(clock: ManualClock) -> CacheView:
    return CacheView(clock, ttl_s=60.0)


def make_event(worker: str, kind: str = "event", *changes: KvEvent) -> Event:
    payload = encode_kv_events(changes) if changes else b""
    return Event("ns.worker.kv_events", worker, 1, 1, payload, kind)  # type: ignore[arg-type]


def test_events_are_counted_by_kind(view: CacheView) -> None:
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(BLOCKS))))
    view.on_event(make_event("a", "event", BlocksRemoved(tuple(BLOCKS[4:]))))
    view.on_event(make_event("a", "event", BlocksCleared(), BlocksStored(0, (BLOCKS[0],))))
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


def test_a_returning_worker_is_exact_after_an_undecodable_event(
    view: CacheView,
) -> None:
    view.on_event(Event("ns.worker.kv_events", "a", 1, 1, b"?", "event"))
    view.on_event(make_event("a", "event", BlocksStored(0, tuple(BLOCKS))))
    assert view.get_mode("a") == "stale"
    view.on_event(make_event("a", "gone"))
    view.on_event(make_event("a", "event", BlocksStored(0, tuple(BLOCKS))))
    assert view.get_mode("a") == "exact"


def test_a_worker_without_a_cache_loses_its_blocks_at_once(view: CacheView) -> None:
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(BLOCKS))))
    view.on_request_routed("a", chain(2, 6))
    view.on_request_routed("b", chain(2, 6))
    view.set_cacheless_workers({"a"})
    assert (view.find_overlaps(BLOCKS), view.find_overlaps(chain(2, 6))) == ({}, {"b": 6})
    view.set_cacheless_workers(set())
    view.on_request_routed("a", BLOCKS)
    assert view.find_overlaps(BLOCKS) == {"a": 6}


class FakeRemoteIndex:
    """Reports all but the last block of every prompt for worker "a"."""

    def __init__(self) -> None:
        self.queries: list[int] = []

    async def match(self, hashes: Sequence[int]) -> IndexMatch:
        self.queries.append(hashes[-1])
        return IndexMatch({"a": len(hashes) - 1})


async def test_a_remote_index_is_queried_for_every_prompt_and_its_answers_are_cached(
    view: CacheView,
) -> None:
    await view.fetch_remote_match(BLOCKS)
    other = FakeRemoteIndex()
    assert view.remote_match is None
    view.remote_match = other.match
    view.on_event(make_event("b", "dump", BlocksStored(0, tuple(BLOCKS))))
    await view.fetch_remote_match([])
    assert (other.queries, view.find_overlaps([]), view.find_overlaps(BLOCKS)) == ([], {}, {})
    await view.fetch_remote_match(BLOCKS)
    view.on_request_routed("c", BLOCKS[:2])
    assert view.find_overlaps(BLOCKS) == {"a": 5, "c": 2}
    for number in range(MAX_REMOTE_MATCHES):
        await view.fetch_remote_match([number, -1 - number])
    assert view.find_overlaps([0, -1]) == {"a": 1}
    assert view.find_overlaps(BLOCKS) == {"c": 2}


async def test_the_newest_answers_are_cached(view: CacheView) -> None:
    view.remote_match = FakeRemoteIndex().match
    await view.fetch_remote_match(BLOCKS)
    for number in range(MAX_REMOTE_MATCHES - 1):
        await view.fetch_remote_match([number, -1 - number])
    await view.fetch_remote_match(BLOCKS)
    await view.fetch_remote_match([1, 2, 3])
    assert view.find_overlaps(BLOCKS) == {"a": 5}


class FakeEvents:
    """An event plane with one subscriber."""

    def __init__(self) -> None:
        self.callback: Callable[[Event], None] | None = None

    def count_lost_events(self) -> int:
        return 7

    async def subscribe(self, prefix: str, callback: Callable[[Event], None]) -> Callable[[], None]:
        self.callback = callback
        return self.unsubscribe

    def unsubscribe(self) -> None:
        self.callback = None


async def test_a_closed_view_applies_no_more_events(view: CacheView) -> None:
    plane: Any = FakeEvents()
    await view.subscribe(plane, "ns.")
    assert view.count_lost_events() == 7
    plane.callback(make_event("a", "dump", BlocksStored(0, tuple(BLOCKS))))
    plane.callback(make_event("a", "event", BlocksRemoved(tuple(BLOCKS[4:]))))
    await asyncio.sleep(0)
    assert view.find_overlaps(BLOCKS) == {"a": 4}
    plane.callback(make_event("b", "dump", BlocksStored(0, tuple(BLOCKS))))
    view.close()
    await asyncio.sleep(0)
    assert view.find_overlaps(BLOCKS) == {"a": 4}
    assert plane.callback is None
