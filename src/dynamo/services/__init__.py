"""The ready-made services: their processes, and their classes for service graphs."""

from dynamo.services.components import (
    DecodeWorker,
    EmbeddingWorker,
    Frontend,
    Planner,
    PrefillWorker,
    Processor,
    Router,
    Worker,
)
from dynamo.services.deployment.launch import deployment_specs, run_child, serve

__all__ = [
    "DecodeWorker",
    "EmbeddingWorker",
    "Frontend",
    "Planner",
    "PrefillWorker",
    "Processor",
    "Router",
    "Worker",
    "deployment_specs",
    "run_child",
    "serve",
]
