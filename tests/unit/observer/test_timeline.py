"""The timeline: what samples hold, how they thin out, and their size."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec

from dynamo.core.values import Load
from dynamo.operations.observer.timeline import RoutingTimeline, series_by_worker

WORKERS = [f"{number:016x}" for number in range(512)]
QUARTER_HOUR_S = 900
MEMORY_BOUND_BYTES = 8_000_000
JSON_BOUND_BYTES = 1_000_000


def busy_loads(second: int) -> dict[str, Load]:
    """Reports of all workers; every number but the size of the memory differs by the second."""
    return {
        name: Load(
            running=(number + second) % 97 + 100,
            waiting=(number + second) % 89 + 10,
            prefill_tokens=(number * 31 + second * 7_919) % 90_000 + 10_000,
            active_blocks=(number + second * 13) % 9_000 + 10_000,
            total_blocks=20_000,
            cached_blocks=(number + second * 17) % 9_000 + 11_000,
        )
        for number, name in enumerate(WORKERS)
    }


def times(timeline: RoutingTimeline) -> list[float]:
    return [sample.at for sample in timeline.samples_since()]


def test_a_quarter_of_an_hour_of_512_busy_workers_is_small() -> None:
    routed: Counter[str] = Counter()
    timeline = RoutingTimeline(routed)
    loads = [busy_loads(second) for second in range(7)]
    views = dict.fromkeys(WORKERS, "exact")
    tracemalloc.start()
    for second in range(QUARTER_HOUR_S):
        for position, name in enumerate(WORKERS):
            routed[name] += second % 7 + position % 5
        at = 10_000.0 + second
        timeline.record(at, WORKERS, loads[second % 7], {}, views=views, waiting=3)
    own_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    answer = msgspec.json.encode(series_by_worker(timeline.samples_since()))
    answering_bytes = tracemalloc.get_traced_memory()[1] - own_bytes
    tracemalloc.stop()
    assert own_bytes < MEMORY_BOUND_BYTES / 4
    assert own_bytes + answering_bytes < MEMORY_BOUND_BYTES * 2
    assert len(answer) < JSON_BOUND_BYTES
    remaining = times(timeline)
    assert remaining[-15:] == [10_885.0 + second for second in range(15)]
    assert max(later - at for at, later in pairwise(remaining)) == 30
    assert remaining[0] <= 10_030.0


def test_samples_thin_out_only_if_the_fleet_is_large() -> None:
    small, large = RoutingTimeline(Counter()), RoutingTimeline(Counter())
    for second in range(QUARTER_HOUR_S + 100):
        at = 10_000.0 + second
        small.record(at, WORKERS[:26], {}, {}, views={}, waiting=0)
        large.record(at, WORKERS[:27], {}, {}, views={}, waiting=0)
    assert times(small) == [10_100.0 + second for second in range(QUARTER_HOUR_S)]
    assert set(times(large)) < set(times(small))
    assert times(large)[:3] == [10_100.0, 10_105.0, 10_110.0]


def test_a_very_large_fleet_keeps_the_last_samples() -> None:
    timeline = RoutingTimeline(Counter())
    fleet = [str(number) for number in range(20_000)]
    for at in (1.0, 2.0, 3.0):
        timeline.record(at, fleet, {}, {}, views={}, waiting=0)
    assert times(timeline) == [2.0, 3.0]


def test_a_clock_that_is_set_back_leaves_the_samples_in_order() -> None:
    timeline = RoutingTimeline(Counter())
    for at in (10.0, 11.0, 12.0, 11.0, 12.0):
        timeline.record(at, ["w"], {}, {}, views={}, waiting=0)
    assert times(timeline) == [10.0, 11.0, 12.0]


def record_of_two_workers() -> RoutingTimeline:
    """A timeline of w1, which has 3 requests a second, and w2, which joins in second 2."""
    routed: Counter[str] = Counter()
    timeline = RoutingTimeline(routed)
    for at in (1.0, 2.0, 3.0):
        routed["w1"] += 3
        loads = {"w1": Load(running=int(at), total_blocks=10, cached_blocks=7)}
        names = ["w1"] if at == 1.0 else ["w2", "w1"]
        if at == 3.0:
            routed["w2"] += 1
        timeline.record(at, names, loads, {"w1": int(at)}, views={"w1": "exact"}, waiting=int(at))
    timeline.record(4.0, ["w2"], {}, {}, views={}, waiting=0)
    assert list(routed) == ["w2"]
    return timeline


def test_series_hold_load_reports_and_routed_requests() -> None:
    series = series_by_worker(record_of_two_workers().samples_since())
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(series))
    assert body["at"] == [1, 2, 3, 4]
    assert body["waiting"] == [1, 2, 3, 0]
    assert body["workers"]["w1"] == {
        "view": "exact",
        "cached_blocks": [7, 7, 7, None],
        "active_blocks": [0, 0, 0, None],
        "total_blocks": [10, 10, 10, None],
        "running": [1, 2, 3, None],
        "waiting": [0, 0, 0, None],
        "prefill_tokens": [0, 0, 0, None],
        "sent": [1, 2, 3, None],
        "routed": [0, 3, 3, None],
    }
    assert body["workers"]["w2"]["view"] == ""
    assert body["workers"]["w2"]["routed"] == [None, 0, 1, 0]


def test_later_samples_count_requests_since_the_sample_before() -> None:
    series = series_by_worker(record_of_two_workers().samples_since(2.0))
    assert series["at"] == [3.0, 4.0]
    assert series["workers"]["w1"]["routed"] == (3, None)
    assert series["workers"]["w2"]["running"] == 0
    assert series_by_worker([])["workers"] == {}
