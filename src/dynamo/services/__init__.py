"""Ready-made components, wired: what the command line starts, and what graphs are made of."""

from dynamo.services.components import Frontend, Processor, Router, Worker
from dynamo.services.deployment.launch import deployment_specs, run_child, serve

__all__ = [
    "Frontend",
    "Processor",
    "Router",
    "Worker",
    "deployment_specs",
    "run_child",
    "serve",
]
