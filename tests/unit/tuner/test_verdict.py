"""The verdict on settings of one process beside its siblings."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from dynamo.operations.planner.values import Promise
from dynamo.operations.tuner.verdict import LiveRequest, TrialRules, TrialVerdict, judge

TRIAL = TrialRules(Promise(1.0, 100.0), 300.0, 0.05)
Times = Callable[[Random, bool], tuple[float, float]]


def requests(times: Times, seed: int = 0, workers: int = 4, rate: float = 8.0) -> list[LiveRequest]:
    """Return requests of a period, which `times` gives TTFT and duration, with a slow swing."""
    rng = Random(seed)
    rows = []
    for number in range(int(300 * rate)):
        arrived_s = number / rate
        worker = rng.randrange(workers)
        swing = 1.5 if 100 < arrived_s < 200 else 1.0
        ttft_s, e2e_s = times(rng, not worker)
        output = rng.choice((20, 200))
        rows.append(
            LiveRequest(
                arrived_s, 500, output, swing * ttft_s, swing * e2e_s * output / 100, f"w-{worker}",
                not worker,
            )
        )  # fmt: skip
    return rows


def verdict(rows: list[LiveRequest], now_s: float = 300.0) -> TrialVerdict:
    answer = judge(TRIAL, rows, now_s)
    assert answer is not None
    return answer


def better(gain: float) -> Times:
    def times(rng: Random, tried: bool) -> tuple[float, float]:
        e2e_s = rng.uniform(1.0, 2.0) * (1 - gain if tried else 1.0)
        return 0.2, e2e_s

    return times


def test_a_gain_is_kept_and_measured() -> None:
    answer = verdict(requests(better(0.2)))
    assert answer.keep
    assert answer.gain == pytest.approx(0.2, abs=0.03)
    assert not verdict(requests(better(0.02))).keep
    assert "less than 5.0%" in verdict(requests(better(-0.2))).why


def test_settings_without_a_gain_are_kept_by_chance_only() -> None:
    chances = sum(verdict(requests(better(0.0), seed, rate=1.0)).keep for seed in range(100))
    assert chances <= 5


def test_there_is_no_verdict_before_the_end() -> None:
    rows = [each for each in requests(better(0.2)) if each.arrived_s < 150]
    assert judge(TRIAL, rows, 150.0) is None
    assert "fewer than 30 requests" in verdict(rows[:50]).why


def test_broken_promises_end_a_trial_early() -> None:
    def late(rng: Random, tried: bool) -> tuple[float, float]:
        return (3.0 if tried else 0.2), rng.uniform(3.0, 4.0)

    rows = requests(late)
    ended_s = next(second for second in range(300) if judge(TRIAL, rows[: 8 * second], second))
    assert ended_s < 60
    broken = sum(each.tried for each in rows[: 8 * ended_s])
    assert broken <= 0.01 * len(rows)


def test_the_end_of_requests_counts_as_a_broken_promise() -> None:
    rows = [
        LiveRequest(each.arrived_s, 500, 0, None, None, each.process, tried=True)
        if each.tried and number % 3
        else each
        for number, each in enumerate(requests(better(0.3)))
    ]
    assert "more requests wait or broke a promise" in verdict(rows).why


def test_requests_that_wait_end_a_trial_early() -> None:
    rows = [each for each in requests(better(0.0)) if not each.tried or each.arrived_s < 10]
    ended_s = next(second for second in range(300) if judge(TRIAL, rows[: 6 * second], second))
    assert 10 < ended_s < 60


def test_a_process_that_alone_keeps_up_is_kept() -> None:
    """Most requests of its siblings wait until the end of the period."""
    rows = [each for each in requests(better(0.0)) if each.tried or each.arrived_s < 90]
    assert verdict(rows).keep


def test_a_process_that_takes_more_of_a_common_queue_gains() -> None:
    """All wait alike for the first free worker: one with room for more takes more."""
    rng = Random(3)
    rows = []
    for number in range(2400):
        tried = rng.random() < 0.4  # of four workers
        worker = 0 if tried else rng.randrange(1, 4)
        queue_s, e2e_s = 2.0, 3.0 + rng.uniform(0, 0.5)
        rows.append(
            LiveRequest(number / 8, 500, 50, queue_s + 0.1, e2e_s, f"w-{worker}", tried, queue_s)
        )
    trial = TrialRules(Promise(), 300.0, 0.05)
    answer = judge(trial, rows, 300.0)
    assert answer is not None
    assert answer.keep
    assert answer.gain == pytest.approx(1 - (3.25 - 2.0 * (1 - 1 / 2)) / 3.25, abs=0.05)


def test_siblings_that_differ_from_each_other_hide_a_gain() -> None:
    """Queues at each process last for minutes, and are chance, too."""
    chances = 0
    for seed in range(60):
        rng = Random(seed)
        factors = [rng.uniform(0.7, 1.3) for _ in range(4)]
        rows = [
            replace(row, e2e_s=row.e2e_s * factors[int(row.process[-1])])  # type: ignore[operator]
            for row in requests(better(0.0), seed, rate=1.0)
        ]
        chances += verdict(rows).keep
    assert chances <= 3
