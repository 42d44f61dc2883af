"""Life cycle, health, cancellation, restart delays."""

from __future__ import annotations

import pytest

from dynamo.core.errors import InternalError
from dynamo.runtime.backoff import Backoff
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.health import Health
from dynamo.runtime.lifecycle import Lifecycle, State


def test_the_life_of_a_component() -> None:
    life = Lifecycle("worker")
    seen: list[State] = []
    life.on_change(seen.append)
    way = [State.REGISTERED, State.RUNNING, State.HEALTHY, State.RUNNING, State.HEALTHY]
    for state in [*way, State.STOPPING, State.DEREGISTERED]:
        life.to(state)
    life.to(State.DEREGISTERED)
    assert seen == [*way, State.STOPPING, State.DEREGISTERED]
    assert life.stopping


@pytest.mark.parametrize("state", [State.HEALTHY, State.RUNNING, State.DEREGISTERED])
def test_no_state_is_skipped(state: State) -> None:
    with pytest.raises(InternalError, match="created"):
        Lifecycle("worker").to(state)


def test_health_says_why() -> None:
    health = Health()
    told: list[dict[str, str]] = []
    health.on_change(lambda: told.append(dict(health.reasons)))
    assert health.well
    health.unwell("model", "loading")
    health.unwell("model", "loading")
    health.unwell("workers", "none")
    assert not health.well
    health.well_again("model")
    health.well_again("model")
    health.well_again("workers")
    assert health.well
    assert told == [
        {"model": "loading"},
        {"model": "loading", "workers": "none"},
        {"workers": "none"},
        {},
    ]


def test_checks_are_asked_at_every_look() -> None:
    health = Health()
    answers = iter(["", "broken"])
    health.check("engine", lambda: next(answers))
    assert health.well
    assert health.reasons == {"engine": "broken"}


async def test_a_token_cancels_its_children_once() -> None:
    token = CancellationToken()
    child = token.child()
    calls: list[str] = []
    child.on_cancel(lambda: calls.append("child"))
    alone = token.child()
    alone.cancel()
    assert not token.cancelled
    token.cancel()
    token.cancel()
    child.on_cancel(lambda: calls.append("late"))
    await child.wait()
    assert calls == ["child", "late"]
    assert token.cancelled
    assert child.cancelled


def test_restarts_wait_longer_until_something_served() -> None:
    backoff = Backoff()
    waits = [backoff.died(0) for _ in range(4)]
    assert waits == [0.1, 0.2, 0.4, 0.8]
    assert not backoff.looping
    assert [backoff.died(0) for _ in range(7)] == [1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0]
    assert backoff.looping
    assert backoff.deaths_unserved == 11
    assert backoff.died(9.9) == 10.0
    assert not backoff.looping
    assert backoff.died(10.0) == 0.1
    assert backoff.died(1.0) == 0.2
