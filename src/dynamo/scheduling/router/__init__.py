"""Which instance gets a request, and why."""

from dynamo.scheduling.router.policy import (
    BasicPolicy,
    Candidate,
    Decision,
    Observer,
    Outcome,
    Policy,
    Ticket,
)
from dynamo.scheduling.router.router import Router

__all__ = [
    "BasicPolicy",
    "Candidate",
    "Decision",
    "Observer",
    "Outcome",
    "Policy",
    "Router",
    "Ticket",
]
