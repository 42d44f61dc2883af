"""Lifecycle, health, cancellation, restart delays."""

from __future__ import annotations

import pytest

from dynamo.core.errors import InternalError
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.health import ProcessHealth
from dynamo.runtime.lifecycle import Lifecycle, LifecycleState
from dynamo.runtime.processes.restart_backoff import RestartBackoff


def test_the_lifecycle_of_a_component() -> None:
    lifecycle = Lifecycle("worker")
    for state in (
        LifecycleState.REGISTERED,
        LifecycleState.RUNNING,
        LifecycleState.HEALTHY,
        LifecycleState.RUNNING,
        LifecycleState.HEALTHY,
        LifecycleState.STOPPING,
        LifecycleState.DEREGISTERED,
        LifecycleState.DEREGISTERED,
    ):
        lifecycle.transition_to(state)
        assert lifecycle.state is state
    assert lifecycle.stopping


@pytest.mark.parametrize(
    "state", [LifecycleState.HEALTHY, LifecycleState.RUNNING, LifecycleState.DEREGISTERED]
)
def test_no_state_is_skipped(state: LifecycleState) -> None:
    with pytest.raises(InternalError, match="created"):
        Lifecycle("worker").transition_to(state)


def test_health_lists_its_reasons() -> None:
    health = ProcessHealth()
    changes: list[dict[str, str]] = []
    health.on_change(lambda: changes.append(dict(health.reasons)))
    assert health.healthy
    health.set_unhealthy("model", "loading")
    health.set_unhealthy("model", "loading")
    health.set_unhealthy("workers", "none")
    assert not health.healthy
    health.set_healthy("model")
    health.set_healthy("model")
    health.set_healthy("workers")
    assert health.healthy
    assert changes == [
        {"model": "loading"},
        {"model": "loading", "workers": "none"},
        {"workers": "none"},
        {},
    ]


def test_checks_run_at_every_read() -> None:
    health = ProcessHealth()
    answers = iter(["", "broken"])
    health.add_check("engine", lambda: next(answers))
    assert health.healthy
    assert health.reasons == {"engine": "broken"}


async def test_a_token_stays_cancelled() -> None:
    token = CancellationToken()
    assert not token.cancelled
    token.cancel()
    token.cancel()
    await token.wait()
    assert token.cancelled


def test_the_restart_delay_doubles_until_the_process_serves() -> None:
    backoff = RestartBackoff()
    waits = [backoff.next_delay_s(0) for _ in range(4)]
    assert waits == [0.1, 0.2, 0.4, 0.8]
    assert not backoff.crash_looping
    assert [backoff.next_delay_s(0) for _ in range(7)] == [1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0]
    assert backoff.crash_looping
    assert backoff.deaths_before_ready == 11
    assert backoff.next_delay_s(9.9) == 10.0
    assert not backoff.crash_looping
    assert backoff.next_delay_s(10.0) == 0.0
    assert backoff.next_delay_s(1.0) == 0.1
    assert backoff.next_delay_s(1.0) == 0.2
