"""Requests are freed by reference counting and leave no cycles for the garbage collector."""

from __future__ import annotations

import gc

from tests.simulation.chaos import ChaosScenario, run_chaos
from tests.simulation.chaos.faults import FaultSchedule, SimulatedWorkers
from tests.simulation.chaos.requests import SimulatedOutcome

CALM = FaultSchedule(crash_every_s=0.0, partition_every_s=0.0)


def test_requests_leave_no_reference_cycles() -> None:
    samples: list[tuple[int, int]] = []

    def sample(hours: float, outcome: SimulatedOutcome, workers: SimulatedWorkers) -> bool:
        del hours, workers
        samples.append((outcome.requests, gc.collect()))
        return True

    gc.collect()
    gc.disable()
    try:
        scenario = ChaosScenario(
            hours=2.1, workers=4, rate=0.05, prompt_tokens=64, answer_tokens=8, faults=CALM
        )
        result = run_chaos(scenario, sample)
    finally:
        gc.enable()
    assert not result.leaks
    (_, _), (before, _), (after, unreachable) = samples
    assert unreachable < (after - before) / 4
