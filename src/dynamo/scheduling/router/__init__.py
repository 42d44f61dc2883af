"""Which instance gets a request, and why."""

from dynamo.scheduling.router.policy import BasicPolicy, Decision, Policy
from dynamo.scheduling.router.router import Router

__all__ = ["BasicPolicy", "Decision", "Policy", "Router"]
