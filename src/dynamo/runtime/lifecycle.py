"""The lifecycle states of a component and the allowed transitions."""

from __future__ import annotations

import logging
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
    """The state of one component."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = LifecycleState.CREATED

    def transition_to(self, state: LifecycleState) -> None:
        """Enter `state`. Raises `InternalError` for a transition that is not allowed."""
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"{self.name} cannot go from {self.state} to {state}")
        self.state = state
        log.debug("lifecycle", extra={"fields": {"component": self.name, "state": str(state)}})

    def follow_health(self, healthy: bool) -> None:
        """Enter Healthy or Running, unless the component is stopping."""
        if not self.stopping:
            self.transition_to(LifecycleState.HEALTHY if healthy else LifecycleState.RUNNING)

    @property
    def stopping(self) -> bool:
        """Whether the component refuses new work."""
        return self.state in {LifecycleState.STOPPING, LifecycleState.DEREGISTERED}
