"""A manual clock, and chains of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dynamo.core.clock import Clock


class ManualClock(Clock):
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep_until(self, when: float) -> None:
        self.time = max(self.time, when)

    async def offload(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def chain(name: int, length: int) -> list[int]:
    return [(name * 1_000_003 + at) * 0x9E3779B97F4A7C15 % 2**64 for at in range(1, length + 1)]
