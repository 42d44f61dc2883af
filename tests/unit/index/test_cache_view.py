"""CacheView: events, and predictions beside or instead of them."""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.unit.index.conftest import ManualClock, chain

from dynamo.communication.events import Event
from dynamo.core.kv_events import encode_kv_events
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.approximate_index import EVENT_GRACE_S
from dynamo.scheduling.index.tiered_index import ANY_WORKER


@pytest.fixture
def view(clock: ManualClock) -> CacheView:
    return CacheView(clock, ttl_s=60.0)


def make_event(worker: str, kind: str = "event", *changes: KvEvent, epoch: int = 1) -> Event:
    payload = encode_kv_events(changes) if changes else b""
    return Event("ns.worker.kv_events", worker, epoch, 1, payload, kind)  # type: ignore[arg-type]


def test_events_update_the_view(view: CacheView) -> None:
    blocks = chain(1, 10)
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(blocks[:4]))))
    view.on_event(make_event("b", "dump"))
    view.on_event(make_event("a", "event", BlocksStored(blocks[3], tuple(blocks[4:6]))))
    assert view.find_overlaps(blocks) == {"a": 6}
    view.on_event(make_event("a", "event", BlocksRemoved((blocks[5],))))
    assert view.find_overlaps(blocks) == {"a": 5}
    assert view.get_modes() == {"a": "exact", "b": "exact"}
    view.on_event(make_event("a", "event", BlocksCleared()))
    assert view.find_overlaps(blocks) == {}


def test_a_dump_replaces_the_known_blocks(view: CacheView) -> None:
    old, new = chain(1, 5), chain(2, 5)
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(old))))
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(new)), epoch=2))
    assert view.find_overlaps(old) == {}
    assert view.find_overlaps(new) == {"a": 5}


def test_a_gone_worker_is_removed(view: CacheView) -> None:
    blocks = chain(1, 5)
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(blocks))))
    view.on_request_routed("a", chain(2, 5))
    view.on_event(make_event("a", "gone"))
    assert view.find_overlaps(blocks) == view.find_overlaps(chain(2, 5)) == view.get_modes() == {}
    assert view.predicted_blocks == 0


def test_a_worker_without_a_cache_has_no_overlap(view: CacheView) -> None:
    blocks = chain(1, 5)
    view.set_cacheless_workers({"a"})
    view.on_event(make_event("a", "dump"))
    view.on_request_routed("a", blocks)
    view.on_request_routed("b", blocks)
    assert view.find_overlaps(blocks) == {"b": 5}
    assert view.get_modes() == {"a": "no prefix cache", "b": "approximate"}
    view.on_prefill_ended("a", blocks)
    view.set_cacheless_workers(set())
    view.on_request_routed("a", blocks)
    assert view.find_overlaps(blocks) == {"a": 5, "b": 5}
    assert view.get_mode("a") == "exact"


def test_other_subjects_are_ignored(view: CacheView) -> None:
    view.on_event(Event("ns.worker.load_metrics", "a", 1, 1, b"?"))
    assert view.get_modes() == {}


def test_a_burst_of_equal_prompts_is_predicted_before_events(
    view: CacheView, clock: ManualClock
) -> None:
    blocks = chain(1, 8)
    view.on_event(make_event("a", "dump"))
    view.on_request_routed("a", blocks)
    assert view.find_overlaps(blocks[:6]) == {"a": 6}
    view.on_prefill_ended("a", blocks)
    assert view.find_overlaps(blocks) == {"a": 8}
    clock.time += EVENT_GRACE_S
    assert view.find_overlaps(blocks) == {}, "after the grace period only events count"


def test_prompts_with_shared_blocks_are_predicted_separately(
    view: CacheView, clock: ManualClock
) -> None:
    long = chain(1, 8)
    short = long[:5]
    view.on_event(make_event("a", "dump"))
    view.on_request_routed("a", long)
    view.on_request_routed("a", short)
    view.on_prefill_ended("a", short)
    clock.time += EVENT_GRACE_S
    assert view.find_overlaps(long) == {"a": 8}
    view.on_prefill_ended("a", long)
    view.on_prefill_ended("a", long)
    clock.time += EVENT_GRACE_S
    assert view.find_overlaps(long) == {}
    assert view.predicted_blocks == 0


def test_equal_prompts_are_settled_separately(view: CacheView, clock: ManualClock) -> None:
    blocks = chain(1, 8)
    view.on_event(make_event("a", "dump"))
    for _ in range(2):
        view.on_request_routed("a", blocks)
    view.on_prefill_ended("a", blocks)
    clock.time += EVENT_GRACE_S
    assert view.find_overlaps(blocks) == {"a": 8}


def test_without_events_predictions_last_until_their_ttl(
    view: CacheView, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(1, 8)
    view.on_request_routed("a", blocks)
    view.on_prefill_ended("a", blocks)
    clock.time += 59
    assert view.get_mode("a") == "approximate"
    assert view.find_overlaps(blocks) == {"a": 8}
    view.on_request_routed("b", chain(2, 3))
    clock.time += 2
    assert view.find_overlaps(blocks) == {}
    assert caplog.text.count("sends no KV events") == 2


def test_the_first_event_ends_retained_predictions(view: CacheView, clock: ManualClock) -> None:
    blocks = chain(1, 8)
    view.on_request_routed("a", blocks)
    view.on_prefill_ended("a", blocks)
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(blocks[:2]))))
    clock.time += EVENT_GRACE_S
    assert view.get_mode("a") == "exact"
    assert view.find_overlaps(blocks) == {"a": 2}


def test_predictions_supplement_a_stale_view(view: CacheView, clock: ManualClock) -> None:
    held, routed = chain(1, 4), chain(2, 6)
    view.on_event(make_event("a", "dump", BlocksStored(0, tuple(held))))
    view.on_event(make_event("a", "stale"))
    view.on_request_routed("a", routed)
    view.on_prefill_ended("a", routed)
    clock.time += 5
    assert view.get_mode("a") == "stale"
    assert view.find_overlaps(held) == {"a": 4}
    assert view.find_overlaps(routed) == {"a": 6}
    view.on_event(make_event("a", "repaired"))
    clock.time += EVENT_GRACE_S
    assert view.get_mode("a") == "exact"
    assert view.find_overlaps(routed) == {}


def test_an_undecodable_event_makes_the_view_stale_until_a_dump(
    view: CacheView, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(1, 3)
    view.on_event(make_event("a", "dump"))
    view.on_event(Event("ns.worker.kv_events", "a", 1, 2, msgspec.msgpack.encode({"new": 1})))
    view.on_event(make_event("a", "event", BlocksStored(0, tuple(blocks))))
    assert view.get_mode("a") == "stale"
    assert "a KV event could not be decoded" in caplog.text
    view.on_event(make_event("a", "dump"))
    assert view.get_mode("a") == "exact"


def test_ranks_are_separate_workers(view: CacheView) -> None:
    blocks = chain(1, 3)
    view.on_event(make_event("a/0", "dump", BlocksStored(0, tuple(blocks))))
    view.on_event(make_event("a/1", "dump", BlocksStored(0, tuple(blocks[:1]))))
    assert view.find_overlaps(blocks) == {"a/0": 3, "a/1": 1}


def test_lower_tiers_continue_after_the_device(view: CacheView) -> None:
    blocks = chain(1, 10)
    view.apply("a", [BlocksStored(0, tuple(blocks[:3]))])
    assert not view.has_lower_tiers
    view.apply("a", [BlocksStored(blocks[2], tuple(blocks[3:5]), "host")])
    view.apply("b", [BlocksStored(0, tuple(blocks[:2]), "disk")])
    view.apply("c", [BlocksStored(0, tuple(blocks[:7]), "shared")])
    overlaps = view.find_overlaps(blocks)
    assert (overlaps, view.has_lower_tiers) == ({"a": 3}, True)
    assert view.find_runs(blocks, overlaps) == {
        "a": [("host", 2), ("shared", 2)],
        "b": [("disk", 2), ("shared", 5)],
        ANY_WORKER: [("shared", 7)],
    }
    view.apply("a", [BlocksRemoved((blocks[4],), "host")])
    assert view.find_runs(blocks, overlaps)["a"] == [("host", 1), ("shared", 3)]
    view.on_request_routed("a", blocks[:6])
    assert view.find_runs(blocks, view.find_overlaps(blocks))["a"] == [("shared", 1)]


def test_the_shared_store_outlives_the_worker_that_stored(view: CacheView) -> None:
    blocks = chain(1, 4)
    view.apply("a", [BlocksStored(0, tuple(blocks), "shared")])
    view.apply("a", [BlocksStored(0, tuple(blocks), "disk")])
    view.remove_worker("a")
    assert view.find_runs(blocks, {}) == {ANY_WORKER: [("shared", 4)]}
    view.apply("b", [BlocksRemoved((blocks[1],), "shared")])
    assert view.find_runs(blocks, {}) == {ANY_WORKER: [("shared", 1)]}
    assert view.find_runs(blocks, {"b": 2}) == {
        "b": [("shared", 2)],
        ANY_WORKER: [("shared", 1)],
    }


def test_an_hour_of_unique_prompts_keeps_memory_constant(clock: ManualClock) -> None:
    view = CacheView(clock, budget_bytes=1 << 20, ttl_s=3600.0)
    rng = random.Random(0)
    seen = []
    for number in range(3600):
        blocks = [rng.getrandbits(64) for _ in range(20)]
        view.on_request_routed("predicted", blocks)
        view.on_prefill_ended("predicted", blocks)
        view.apply("reported", [BlocksStored(0, tuple(blocks))])
        clock.time += 1.0
        if number % 600 == 599:
            seen.append(
                (view.predicted_blocks, view.device_index.block_count, view.device_index.bytes_used)
            )
    assert view.device_index.bytes_used <= 1 << 20
    assert view.device_index.evicted_blocks > 0
    assert seen[-1] == seen[-2]
    assert view.find_overlaps(blocks) == {"predicted": 20, "reported": 20}
