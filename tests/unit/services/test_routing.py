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
