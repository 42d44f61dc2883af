"""Which instance gets a request, and why."""

from dynamo.scheduling.router.collector.collector import PerformanceReport, RoutingMetricsCollector
from dynamo.scheduling.router.library.aggregator import KvMetricsAggregator
from dynamo.scheduling.router.library.kv_indexer import KVIndexer
from dynamo.scheduling.router.library.kv_router import (
    CacheHitAnalysis,
    KvRouter,
    PerformanceRequirements,
    PrefixAnalysis,
    SchedulingRequest,
    WorkerSelectionResult,
    WorkerStatus,
)
from dynamo.scheduling.router.policies.adaptive_balancer import (
    AdaptiveLoadBalancer,
    Capacity,
    LoadBalancingError,
    LoadPredictionModel,
    WorkerAssignment,
)
from dynamo.scheduling.router.policy import (
    BasicPolicy,
    Candidate,
    Decision,
    Observer,
    Outcome,
    Policy,
)
from dynamo.scheduling.router.roles import DisaggregationRouter, QueueStatus
from dynamo.scheduling.router.router import WorkerRouter
from dynamo.scheduling.router.selectors import (
    DefaultWorkerSelector,
    RouterError,
    SelectionStrategy,
    WorkerScore,
    WorkerSelector,
)

__all__ = [
    "AdaptiveLoadBalancer",
    "BasicPolicy",
    "CacheHitAnalysis",
    "Candidate",
    "Capacity",
    "Decision",
    "DefaultWorkerSelector",
    "DisaggregationRouter",
    "KVIndexer",
    "KvMetricsAggregator",
    "KvRouter",
    "LoadBalancingError",
    "LoadPredictionModel",
    "Observer",
    "Outcome",
    "PerformanceReport",
    "PerformanceRequirements",
    "Policy",
    "PrefixAnalysis",
    "QueueStatus",
    "RouterError",
    "RoutingMetricsCollector",
    "SchedulingRequest",
    "SelectionStrategy",
    "WorkerAssignment",
    "WorkerRouter",
    "WorkerScore",
    "WorkerSelectionResult",
    "WorkerSelector",
    "WorkerStatus",
]
