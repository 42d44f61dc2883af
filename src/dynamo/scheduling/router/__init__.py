"""Which instance gets a request, and why."""

from dynamo.scheduling.index.indexer import KVIndexer
from dynamo.scheduling.router.adaptive import (
    AdaptiveLoadBalancer,
    Capacity,
    LoadBalancingError,
    LoadPredictionModel,
    WorkerAssignment,
)
from dynamo.scheduling.router.aggregator import KvMetricsAggregator
from dynamo.scheduling.router.collector import PerformanceReport, RoutingMetricsCollector
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
    "AdaptiveLoadBalancer",
    "BasicPolicy",
    "Candidate",
    "Capacity",
    "Decision",
    "KVIndexer",
    "KvMetricsAggregator",
    "LoadBalancingError",
    "LoadPredictionModel",
    "Observer",
    "Outcome",
    "PerformanceReport",
    "Policy",
    "Router",
    "RoutingMetricsCollector",
    "Ticket",
    "WorkerAssignment",
]
