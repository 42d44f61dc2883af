"""The price of pauses follows the share of gaps above the target."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo.core.values import Load
from dynamo.scheduling.router.harm_steering import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    START_WEIGHT,
    TARGET_SHARE,
    HarmSteering,
)

CONSTANT = 15.0
GAPS_PER_REPORT = 1_000


class Reports:
    """Reports of one worker every 0.1 s, whose totals grow."""

    def __init__(self, target_ms: float = 25.0) -> None:
        self.steering = HarmSteering()
        self.steering.update_target(target_ms, CONSTANT)
        self.now = 0.0
        self.gaps = self.slow_gaps = 0

    def send(self, slow_share: float, seconds: float, worker: str = "a") -> float:
        """Report for a time at this share of slow gaps, and return the weight."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.gaps += GAPS_PER_REPORT
            self.slow_gaps += round(slow_share * GAPS_PER_REPORT)
            self.steering.on_load_report(
                worker, Load(gaps=self.gaps, slow_gaps=self.slow_gaps), self.now
            )
        return self.steering.weight

    def follow(self, slow_share: Callable[[float], float], seconds: int) -> list[float]:
        """Report at the share that each weight causes, and return the weight of each second."""
        return [self.send(min(1.0, slow_share(self.steering.weight)), 1) for _ in range(seconds)]


def test_the_weight_rises_while_too_many_gaps_are_slow_and_falls_while_few_are() -> None:
    reports = Reports()

    raised = reports.send(0.05, 5)
    assert raised > START_WEIGHT
    assert reports.send(0.0, 120) < START_WEIGHT
    assert reports.steering.slow_share < 0.001


def test_the_weight_stays_within_its_bounds() -> None:
    reports = Reports()

    assert max(reports.follow(lambda weight: 4.0 / weight, 600)) == MAX_WEIGHT
    assert reports.send(0.0, 600) == MIN_WEIGHT


@pytest.mark.parametrize("slow_share", [0.02, 0.3, 1.0])
def test_a_weight_of_no_use_falls_to_that_without_a_target(slow_share: float) -> None:
    reports = Reports()

    reports.send(slow_share, 120)
    assert reports.send(slow_share, 180) == CONSTANT
    assert reports.send(0.0, 600) == MIN_WEIGHT
    assert reports.send(slow_share, 20) > MIN_WEIGHT  # tried once more


def test_the_weight_returns_from_where_it_makes_more_gaps_slow() -> None:
    """Slow gaps are fewest at a weight of 80, and too many there, too."""
    weights = Reports().follow(lambda weight: 0.05 * max(80.0 / weight, weight / 80.0), 900)[300:]

    assert 30.0 < sum(weights) / len(weights) < 200.0


def test_a_weight_that_lowers_the_share_is_kept_at_the_target() -> None:
    weights = Reports().follow(lambda weight: TARGET_SHARE * 120.0 / weight, 900)[400:]

    assert 80.0 < min(weights) <= max(weights) < 180.0


def test_without_a_target_or_reported_gaps_the_weight_is_constant() -> None:
    assert Reports(target_ms=0.0).send(1.0, 60) == CONSTANT

    steering = Reports().steering
    for second in range(60):
        steering.on_load_report("old version", Load(running=3, steps=second), second)
    assert steering.weight == START_WEIGHT


def test_totals_from_before_the_first_report_do_not_count() -> None:
    reports = Reports()
    reports.gaps = reports.slow_gaps = 10**9

    assert reports.send(0.0, 20) < START_WEIGHT
    reports.gaps = reports.slow_gaps = 0  # the worker began again
    reports.send(0.0, 1)
    assert reports.steering.slow_share == 0.0


def test_a_removed_worker_is_forgotten() -> None:
    reports = Reports()
    reports.send(0.0, 1)
    reports.steering.retain_workers(["b"])
    reports.slow_gaps = reports.gaps = 10**9

    assert reports.send(0.0, 20) < START_WEIGHT


@pytest.mark.parametrize("slow_share", [0.0, 1.0])
def test_a_target_can_be_changed_and_removed_at_run_time(slow_share: float) -> None:
    reports = Reports()
    steered = reports.send(slow_share, 30)

    reports.steering.update_target(40.0, CONSTANT)
    assert reports.steering.weight == steered
    reports.steering.update_target(0.0, CONSTANT)
    assert reports.steering.weight == CONSTANT
    reports.steering.update_target(25.0, CONSTANT)
    assert reports.steering.weight == START_WEIGHT
