"""The log lines of a frontend about the availability of its routers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dynamo.core.clock import SystemClock
from dynamo.scheduling.router.policies.remote import MIN_LOG_INTERVAL_S, RemotePolicy

ANY = cast("Any", None)


class ManualClock(SystemClock):
    """A clock that the test moves."""

    now_s = 0.0

    def now(self) -> float:  # type: ignore[override]
        return self.now_s


def test_availability_is_logged_at_most_twice_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "dynamo.scheduling")
    clock = ManualClock()
    policy = RemotePolicy(ANY, ANY, ANY, clock, block_tokens=16)
    for available in (True, False, True, False, True, False):
        policy._log_availability(available)
    clock.now_s += MIN_LOG_INTERVAL_S
    policy._log_availability(False)
    policy._log_availability(True)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "no router answers: choosing workers in this process"),
        ("INFO", "a router answers again"),
    ]
