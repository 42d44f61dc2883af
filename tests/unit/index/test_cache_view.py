"""What the view believes: events, predictions beside them, and in their place."""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.unit.index.conftest import HandClock, chain

from dynamo.communication.events import Event
from dynamo.core.kv_events import encode_changes
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.predictions import GRACE_S


@pytest.fixture
def view(clock: HandClock) -> CacheView:
    return CacheView(clock, ttl_s=60.0)


def told(worker: str, kind: str = "event", *changes: KvEvent, epoch: int = 1) -> Event:
    payload = encode_changes(changes) if changes else b""
    return Event("ns.worker.kv_events", worker, epoch, 1, payload, kind)  # type: ignore[arg-type]


def test_events_are_believed(view: CacheView) -> None:
    blocks = chain(1, 10)
    view.hear(told("a", "dump", BlocksStored(0, tuple(blocks[:4]))))
    view.hear(told("b", "dump"))
    view.hear(told("a", "event", BlocksStored(blocks[3], tuple(blocks[4:6]))))
    assert view.overlaps(blocks) == {"a": 6}
    view.hear(told("a", "event", BlocksRemoved((blocks[5],))))
    assert view.overlaps(blocks) == {"a": 5}
    assert view.modes() == {"a": "exact", "b": "exact"}
    view.hear(told("a", "event", BlocksCleared()))
    assert view.overlaps(blocks) == {}


def test_a_dump_replaces_what_was_known(view: CacheView) -> None:
    old, new = chain(1, 5), chain(2, 5)
    view.hear(told("a", "dump", BlocksStored(0, tuple(old))))
    view.hear(told("a", "dump", BlocksStored(0, tuple(new)), epoch=2))
    assert view.overlaps(old) == {}
    assert view.overlaps(new) == {"a": 5}


def test_a_worker_that_is_gone_is_forgotten(view: CacheView) -> None:
    blocks = chain(1, 5)
    view.hear(told("a", "dump", BlocksStored(0, tuple(blocks))))
    view.routed("a", chain(2, 5))
    view.hear(told("a", "gone"))
    assert view.overlaps(blocks) == view.overlaps(chain(2, 5)) == view.modes() == {}
    assert view.predicted_blocks == 0


def test_nothing_is_expected_of_a_worker_without_a_cache(view: CacheView) -> None:
    blocks = chain(1, 5)
    view.cacheless({"a"})
    view.hear(told("a", "dump"))
    view.routed("a", blocks)
    view.routed("b", blocks)
    assert view.overlaps(blocks) == {"b": 5}
    assert view.modes() == {"a": "no prefix cache", "b": "approximate"}
    view.settled("a", blocks)
    view.cacheless(set())
    view.routed("a", blocks)
    assert view.overlaps(blocks) == {"a": 5, "b": 5}
    assert view.mode("a") == "exact"


def test_other_subjects_are_not_for_it(view: CacheView) -> None:
    view.hear(Event("ns.worker.load_metrics", "a", 1, 1, b"?"))
    assert view.modes() == {}


def test_a_burst_goes_together_before_the_first_event(view: CacheView, clock: HandClock) -> None:
    blocks = chain(1, 8)
    view.hear(told("a", "dump"))
    view.routed("a", blocks)
    assert view.overlaps(blocks[:6]) == {"a": 6}
    view.settled("a", blocks)
    assert view.overlaps(blocks) == {"a": 8}
    clock.time += GRACE_S
    assert view.overlaps(blocks) == {}, "now events would have told"


def test_prompts_that_share_blocks_are_counted_apart(view: CacheView, clock: HandClock) -> None:
    long = chain(1, 8)
    short = long[:5]
    view.hear(told("a", "dump"))
    view.routed("a", long)
    view.routed("a", short)
    view.settled("a", short)
    clock.time += GRACE_S
    assert view.overlaps(long) == {"a": 8}
    view.settled("a", long)
    view.settled("a", long)
    clock.time += GRACE_S
    assert view.overlaps(long) == {}
    assert view.predicted_blocks == 0


def test_the_same_prompt_twice_is_settled_twice(view: CacheView, clock: HandClock) -> None:
    blocks = chain(1, 8)
    view.hear(told("a", "dump"))
    for _ in range(2):
        view.routed("a", blocks)
    view.settled("a", blocks)
    clock.time += GRACE_S
    assert view.overlaps(blocks) == {"a": 8}


def test_without_events_predictions_last(
    view: CacheView, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(1, 8)
    view.routed("a", blocks)
    view.settled("a", blocks)
    clock.time += 59
    assert view.mode("a") == "approximate"
    assert view.overlaps(blocks) == {"a": 8}
    view.routed("b", chain(2, 3))
    clock.time += 2
    assert view.overlaps(blocks) == {}
    assert caplog.text.count("sends no KV events") == 2


def test_events_end_the_guessing(view: CacheView, clock: HandClock) -> None:
    blocks = chain(1, 8)
    view.routed("a", blocks)
    view.settled("a", blocks)
    view.hear(told("a", "dump", BlocksStored(0, tuple(blocks[:2]))))
    clock.time += GRACE_S
    assert view.mode("a") == "exact"
    assert view.overlaps(blocks) == {"a": 2}


def test_behind_a_gap_predictions_stand_in(view: CacheView, clock: HandClock) -> None:
    held, routed = chain(1, 4), chain(2, 6)
    view.hear(told("a", "dump", BlocksStored(0, tuple(held))))
    view.hear(told("a", "stale"))
    view.routed("a", routed)
    view.settled("a", routed)
    clock.time += 5
    assert view.mode("a") == "stale"
    assert view.overlaps(held) == {"a": 4}
    assert view.overlaps(routed) == {"a": 6}
    view.hear(told("a", "repaired"))
    clock.time += GRACE_S
    assert view.mode("a") == "exact"
    assert view.overlaps(routed) == {}


def test_what_cannot_be_read_stays_stale_until_a_dump(
    view: CacheView, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(1, 3)
    view.hear(told("a", "dump"))
    view.hear(Event("ns.worker.kv_events", "a", 1, 2, msgspec.msgpack.encode({"new": 1})))
    view.hear(told("a", "event", BlocksStored(0, tuple(blocks))))
    assert view.mode("a") == "stale"
    assert "KV event not understood" in caplog.text
    view.hear(told("a", "dump"))
    assert view.mode("a") == "exact"


def test_ranks_are_workers_of_their_own(view: CacheView) -> None:
    blocks = chain(1, 3)
    view.hear(told("a/0", "dump", BlocksStored(0, tuple(blocks))))
    view.hear(told("a/1", "dump", BlocksStored(0, tuple(blocks[:1]))))
    assert view.overlaps(blocks) == {"a/0": 3, "a/1": 1}


def test_tiers_go_on_where_the_device_ends(view: CacheView) -> None:
    blocks = chain(1, 10)
    view.apply("a", [BlocksStored(0, tuple(blocks[:3]))])
    view.apply("a", [BlocksStored(blocks[2], tuple(blocks[3:5]), "host")])
    view.apply("b", [BlocksStored(0, tuple(blocks[:2]), "disk")])
    view.apply("store", [BlocksStored(0, tuple(blocks[:7]), "shared")])
    overlaps = view.overlaps(blocks)
    below = view.below(blocks, overlaps)
    assert overlaps == {"a": 3}
    assert (below["a"].host, below["a"].disk, below["a"].shared) == (2, 0, 2)
    assert (below["b"].host, below["b"].disk, below["b"].shared) == (0, 2, 5)
    view.apply("a", [BlocksRemoved((blocks[4],), "host")])
    assert view.below(blocks, overlaps)["a"].shared == 3
    view.drop("a")
    assert "a" not in view.below(blocks, {})


def test_an_hour_of_unique_prompts_leaves_memory_flat(clock: HandClock) -> None:
    view = CacheView(clock, budget_bytes=1 << 20, ttl_s=3600.0)
    rng = random.Random(0)
    seen = []
    for number in range(3600):
        blocks = [rng.getrandbits(64) for _ in range(20)]
        view.routed("guessed", blocks)
        view.settled("guessed", blocks)
        view.apply("told", [BlocksStored(0, tuple(blocks))])
        clock.time += 1.0
        if number % 600 == 599:
            seen.append((view.predicted_blocks, view.index.blocks, view.index.bytes_used))
    assert view.index.bytes_used <= 1 << 20
    assert view.index.evicted > 0
    assert seen[-1] == seen[-2]
    assert view.overlaps(blocks) == {"guessed": 20, "told": 20}
