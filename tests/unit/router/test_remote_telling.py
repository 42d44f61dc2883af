"""How often a frontend tells that its router is away, and back."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dynamo.core.clock import SystemClock
from dynamo.scheduling.router.policies.remote import MIN_LOG_INTERVAL_S, RemotePolicy

ANY = cast("Any", None)


class Hand(SystemClock):
    """Whose time somebody sets."""

    now_s = 0.0

    def now(self) -> float:  # type: ignore[override]
        return self.now_s


def test_a_router_that_comes_and_goes_is_told_of_twice_a_second_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "dynamo.scheduling")
    clock = Hand()
    policy = RemotePolicy(ANY, ANY, ANY, ANY, clock, block_tokens=16)
    for asked in (True, False, True, False, True, False):
        policy._log_availability(asked)
    clock.now_s += MIN_LOG_INTERVAL_S
    policy._log_availability(False)
    policy._log_availability(True)
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "no router answers: choosing workers in this process"),
        ("INFO", "a router answers again"),
    ]
