"""What a request leaves behind is freed at once, not kept for the collector of circles."""

from __future__ import annotations

import gc

from dynamo.testing.day import Day, live_through
from dynamo.testing.day.faults import Faults, Fleet
from dynamo.testing.day.requests import Tally

CALM = Faults(crash_every_s=0.0, partition_every_s=0.0)


def test_requests_leave_no_circles() -> None:
    found: list[tuple[int, int]] = []

    def look(hours: float, tally: Tally, fleet: Fleet) -> bool:
        del hours, fleet
        found.append((tally.requests, gc.collect()))
        return True

    gc.collect()
    gc.disable()
    try:
        day = Day(hours=2.1, workers=4, rate=0.05, prompt_tokens=64, answer_tokens=8, faults=CALM)
        result = live_through(day, look)
    finally:
        gc.enable()
    assert not result.leaks
    (_, _), (before, _), (after, unreachable) = found
    assert unreachable < (after - before) / 4
