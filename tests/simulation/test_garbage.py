"""What a request leaves behind is freed at once, not kept for the collector of circles."""

from __future__ import annotations

import gc

from dynamo.testing.chaos import ChaosScenario, run_chaos
from dynamo.testing.chaos.faults import FaultSchedule, SimulatedWorkers
from dynamo.testing.chaos.requests import SimulatedOutcome

CALM = FaultSchedule(crash_every_s=0.0, partition_every_s=0.0)


def test_requests_leave_no_circles() -> None:
    found: list[tuple[int, int]] = []

    def look(hours: float, tally: SimulatedOutcome, fleet: SimulatedWorkers) -> bool:
        del hours, fleet
        found.append((tally.requests, gc.collect()))
        return True

    gc.collect()
    gc.disable()
    try:
        day = ChaosScenario(
            hours=2.1, workers=4, rate=0.05, prompt_tokens=64, answer_tokens=8, faults=CALM
        )
        result = run_chaos(day, look)
    finally:
        gc.enable()
    assert not result.leaks
    (_, _), (before, _), (after, unreachable) = found
    assert unreachable < (after - before) / 4
