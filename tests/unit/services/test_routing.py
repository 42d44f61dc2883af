"""The routing state of a process: one sample each second, also with timers that fire early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.core.settings import Settings
from dynamo.services.routing import ProcessRouting
from dynamo.telemetry import Registry


class StoppedTest(Exception):
    """Raised by the clock at the end of the test."""


class EarlyClock:
    """A clock whose sleeps end 0.6 ms early, as uvloop's timers may."""

    def __init__(self, end_s: float) -> None:
        self.time_s = 1_000.4
        self.end_s = end_s

    def wall(self) -> float:
        return self.time_s

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += max(seconds - 0.0006, 0.0001)
        if self.time_s > self.end_s:
            raise StoppedTest


async def test_every_second_has_one_sample() -> None:
    runtime: Any = SimpleNamespace(
        settings=Settings(), clock=EarlyClock(1_060.5), metrics=Registry(), name="test", rng=None
    )
    routing = ProcessRouting(runtime)
    with pytest.raises(StoppedTest):
        await routing._sample_every_second()
    times = [sample.at for sample in routing.timeline.samples_since()]
    assert times == [float(second) for second in range(1_001, 1_061)]


class SetBackClock(EarlyClock):
    """A clock that is set back by an hour once. `longest_s` is the longest sleep."""

    longest_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)
        if self.time_s > 1_010.0:
            self.time_s, self.end_s = self.time_s - 3_600.0, -2_580.0
        await super().sleep(seconds)


async def test_sampling_goes_on_when_the_wall_clock_is_set_back() -> None:
    clock = SetBackClock(1_060.5)
    runtime: Any = SimpleNamespace(
        settings=Settings(), clock=clock, metrics=Registry(), name="test", rng=None
    )
    with pytest.raises(StoppedTest):
        await ProcessRouting(runtime)._sample_every_second()
    assert clock.longest_s < 1.1
