"""The states of a component's life, and which may follow which."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum

from dynamo.core.errors import InternalError

log = logging.getLogger(__name__)


class State(StrEnum):
    """Created -> Registered -> Running <-> Healthy -> Stopping -> Deregistered."""

    CREATED = "created"
    REGISTERED = "registered"
    RUNNING = "running"
    HEALTHY = "healthy"
    STOPPING = "stopping"
    DEREGISTERED = "deregistered"


NEXT: dict[State, tuple[State, ...]] = {
    State.CREATED: (State.REGISTERED, State.STOPPING),
    State.REGISTERED: (State.RUNNING, State.STOPPING),
    State.RUNNING: (State.HEALTHY, State.STOPPING),
    State.HEALTHY: (State.RUNNING, State.STOPPING),
    State.STOPPING: (State.DEREGISTERED,),
    State.DEREGISTERED: (),
}


class Lifecycle:
    """Where one component stands. Listeners are told of every change."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.state = State.CREATED
        self._listeners: list[Callable[[State], None]] = []

    def on_change(self, listener: Callable[[State], None]) -> None:
        """Call `listener(state)` after every change."""
        self._listeners.append(listener)

    def to(self, state: State) -> None:
        """Enter `state`; staying is no change. Raises `InternalError` where it may not follow."""
        if state is self.state:
            return
        if state not in NEXT[self.state]:
            raise InternalError(f"{self.what} cannot go from {self.state} to {state}")
        self.state = state
        log.debug("state", extra={"fields": {"what": self.what, "state": str(state)}})
        for listener in self._listeners:
            listener(state)

    @property
    def stopping(self) -> bool:
        """No new work is taken."""
        return self.state in {State.STOPPING, State.DEREGISTERED}
