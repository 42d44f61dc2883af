"""What the view believes: events, predictions beside them, and in their place."""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.unit.index.conftest import HandClock, chain

from dynamo.communication.events import Event
from dynamo.core.kv_events import encode_kv_events
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.approximate_index import EVENT_GRACE_S


@pytest.fixture
def view(clock: HandClock) -> CacheView:
    return CacheView(clock, ttl_s=60.0)


def told(worker: str, kind: str = "event", *changes: KvEvent, epoch: int = 1) -> Event:
    payload = encode_kv_events(changes) if changes else b""
    return Event("ns.worker.kv_events", worker, epoch, 1, payload, kind)  # type: ignore[arg-type]


def test_events_are_believed(view: CacheView) -> None:
    blocks = chain(1, 10)
    view.on_event(told("a", "dump", BlocksStored(0, tuple(blocks[:4]))))
    view.on_event(told("b", "dump"))
    view.on_event(told("a", "event", BlocksStored(blocks[3], tuple(blocks[4:6]))))
    assert view.find_overlaps(blocks) == {"a": 6}
    view.on_event(told("a", "event", BlocksRemoved((blocks[5],))))
    assert view.find_overlaps(blocks) == {"a": 5}
    assert view.get_modes() == {"a": "exact", "b": "exact"}
    view.on_event(told("a", "event", BlocksCleared()))
    assert view.find_overlaps(blocks) == {}


def test_a_dump_replaces_what_was_known(view: CacheView) -> None:
    old, new = chain(1, 5), chain(2, 5)
    view.on_event(told("a", "dump", BlocksStored(0, tuple(old))))
    view.on_event(told("a", "dump", BlocksStored(0, tuple(new)), epoch=2))
    assert view.find_overlaps(old) == {}
    assert view.find_overlaps(new) == {"a": 5}


def test_a_worker_that_is_gone_is_forgotten(view: CacheView) -> None:
    blocks = chain(1, 5)
    view.on_event(told("a", "dump", BlocksStored(0, tuple(blocks))))
    view.on_request_routed("a", chain(2, 5))
    view.on_event(told("a", "gone"))
    assert view.find_overlaps(blocks) == view.find_overlaps(chain(2, 5)) == view.get_modes() == {}
    assert view.predicted_blocks == 0


def test_nothing_is_expected_of_a_worker_without_a_cache(view: CacheView) -> None:
    blocks = chain(1, 5)
    view.set_cacheless_workers({"a"})
    view.on_event(told("a", "dump"))
    view.on_request_routed("a", blocks)
    view.on_request_routed("b", blocks)
    assert view.find_overlaps(blocks) == {"b": 5}
    assert view.get_modes() == {"a": "no prefix cache", "b": "approximate"}
    view.on_prefill_ended("a", blocks)
    view.set_cacheless_workers(set())
    view.on_request_routed("a", blocks)
    assert view.find_overlaps(blocks) == {"a": 5, "b": 5}
    assert view.get_mode("a") == "exact"


def test_other_subjects_are_not_for_it(view: CacheView) -> None:
    view.on_event(Event("ns.worker.load_metrics", "a", 1, 1, b"?"))
    assert view.get_modes() == {}


def test_a_burst_goes_together_before_the_first_event(view: CacheView, clock: HandClock) -> None:
    blocks = chain(1, 8)
    view.on_event(told("a", "dump"))
    view.on_request_routed("a", blocks)
    assert view.find_overlaps(blocks[:6]) == {"a": 6}
    view.on_prefill_ended("a", blocks)
    assert view.find_overlaps(blocks) == {"a": 8}
    clock.time += EVENT_GRACE_S
    assert view.find_overlaps(blocks) == {}, "now events would have told"


def test_prompts_that_share_blocks_are_counted_apart(view: CacheView, clock: HandClock) -> None:
    long = chain(1, 8)
    short = long[:5]
    view.on_event(told("a", "dump"))
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


def test_the_same_prompt_twice_is_settled_twice(view: CacheView, clock: HandClock) -> None:
    blocks = chain(1, 8)
    view.on_event(told("a", "dump"))
    for _ in range(2):
        view.on_request_routed("a", blocks)
    view.on_prefill_ended("a", blocks)
    clock.time += EVENT_GRACE_S
    assert view.find_overlaps(blocks) == {"a": 8}


def test_without_events_predictions_last(
    view: CacheView, clock: HandClock, caplog: pytest.LogCaptureFixture
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


def test_events_end_the_guessing(view: CacheView, clock: HandClock) -> None:
    blocks = chain(1, 8)
    view.on_request_routed("a", blocks)
    view.on_prefill_ended("a", blocks)
    view.on_event(told("a", "dump", BlocksStored(0, tuple(blocks[:2]))))
    clock.time += EVENT_GRACE_S
    assert view.get_mode("a") == "exact"
    assert view.find_overlaps(blocks) == {"a": 2}


def test_behind_a_gap_predictions_stand_in(view: CacheView, clock: HandClock) -> None:
    held, routed = chain(1, 4), chain(2, 6)
    view.on_event(told("a", "dump", BlocksStored(0, tuple(held))))
    view.on_event(told("a", "stale"))
    view.on_request_routed("a", routed)
    view.on_prefill_ended("a", routed)
    clock.time += 5
    assert view.get_mode("a") == "stale"
    assert view.find_overlaps(held) == {"a": 4}
    assert view.find_overlaps(routed) == {"a": 6}
    view.on_event(told("a", "repaired"))
    clock.time += EVENT_GRACE_S
    assert view.get_mode("a") == "exact"
    assert view.find_overlaps(routed) == {}


def test_what_cannot_be_read_stays_stale_until_a_dump(
    view: CacheView, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(1, 3)
    view.on_event(told("a", "dump"))
    view.on_event(Event("ns.worker.kv_events", "a", 1, 2, msgspec.msgpack.encode({"new": 1})))
    view.on_event(told("a", "event", BlocksStored(0, tuple(blocks))))
    assert view.get_mode("a") == "stale"
    assert "a KV event could not be decoded" in caplog.text
    view.on_event(told("a", "dump"))
    assert view.get_mode("a") == "exact"


def test_ranks_are_workers_of_their_own(view: CacheView) -> None:
    blocks = chain(1, 3)
    view.on_event(told("a/0", "dump", BlocksStored(0, tuple(blocks))))
    view.on_event(told("a/1", "dump", BlocksStored(0, tuple(blocks[:1]))))
    assert view.find_overlaps(blocks) == {"a/0": 3, "a/1": 1}


def test_tiers_go_on_where_the_device_ends(view: CacheView) -> None:
    blocks = chain(1, 10)
    view.apply("a", [BlocksStored(0, tuple(blocks[:3]))])
    view.apply("a", [BlocksStored(blocks[2], tuple(blocks[3:5]), "host")])
    view.apply("b", [BlocksStored(0, tuple(blocks[:2]), "disk")])
    view.apply("store", [BlocksStored(0, tuple(blocks[:7]), "shared")])
    overlaps = view.find_overlaps(blocks)
    below = view.find_lower_tier_blocks(blocks, overlaps)
    assert overlaps == {"a": 3}
    assert (below["a"].host, below["a"].disk, below["a"].shared) == (2, 0, 2)
    assert (below["b"].host, below["b"].disk, below["b"].shared) == (0, 2, 5)
    view.apply("a", [BlocksRemoved((blocks[4],), "host")])
    assert view.find_lower_tier_blocks(blocks, overlaps)["a"].shared == 3
    view.remove_worker("a")
    assert "a" not in view.find_lower_tier_blocks(blocks, {})


def test_an_hour_of_unique_prompts_leaves_memory_flat(clock: HandClock) -> None:
    view = CacheView(clock, budget_bytes=1 << 20, ttl_s=3600.0)
    rng = random.Random(0)
    seen = []
    for number in range(3600):
        blocks = [rng.getrandbits(64) for _ in range(20)]
        view.on_request_routed("guessed", blocks)
        view.on_prefill_ended("guessed", blocks)
        view.apply("told", [BlocksStored(0, tuple(blocks))])
        clock.time += 1.0
        if number % 600 == 599:
            seen.append(
                (view.predicted_blocks, view.device_index.block_count, view.device_index.bytes_used)
            )
    assert view.device_index.bytes_used <= 1 << 20
    assert view.device_index.evicted_blocks > 0
    assert seen[-1] == seen[-2]
    assert view.find_overlaps(blocks) == {"guessed": 20, "told": 20}
