"""The states of a component's life, and which may follow which."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum

from dynamo.core.errors import InternalError

log = logging.getLogger(__name__)


class LifecycleState(StrEnum):
    """Created -> Registered -> Running <-> Healthy -> Stopping -> Deregistered."""

    CREATED = "created"
    REGISTERED = "registered"
    RUNNING = "running"
    HEALTHY = "healthy"
    STOPPING = "stopping"
    DEREGISTERED = "deregistered"


TRANSITIONS: dict[LifecycleState, tuple[LifecycleState, ...]] = {
    LifecycleState.CREATED: (LifecycleState.REGISTERED, LifecycleState.STOPPING),
    LifecycleState.REGISTERED: (LifecycleState.RUNNING, LifecycleState.STOPPING),
    LifecycleState.RUNNING: (LifecycleState.HEALTHY, LifecycleState.STOPPING),
    LifecycleState.HEALTHY: (LifecycleState.RUNNING, LifecycleState.STOPPING),
    LifecycleState.STOPPING: (LifecycleState.DEREGISTERED,),
    LifecycleState.DEREGISTERED: (),
}


class Lifecycle:
    """Where one component stands. Listeners are told of every change."""

    def __init__(self, what: str) -> None:
        self.name = what
        self.state = LifecycleState.CREATED
        self._listeners: list[Callable[[LifecycleState], None]] = []

    def on_change(self, listener: Callable[[LifecycleState], None]) -> None:
        """Call `listener(state)` after every change."""
        self._listeners.append(listener)

    def transition_to(self, state: LifecycleState) -> None:
        """Enter `state`; staying is no change. Raises `InternalError` where it may not follow."""
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"{self.name} cannot go from {self.state} to {state}")
        self.state = state
        log.debug("state", extra={"fields": {"what": self.name, "state": str(state)}})
        for listener in self._listeners:
            listener(state)

    @property
    def stopping(self) -> bool:
        """No new work is taken."""
        return self.state in {LifecycleState.STOPPING, LifecycleState.DEREGISTERED}
