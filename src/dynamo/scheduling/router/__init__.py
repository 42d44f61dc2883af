"""Which instance gets a request, and why."""

from typing import TYPE_CHECKING

from dynamo.core.public_names import load_on_use
from dynamo.scheduling.router.attempt import Observer
from dynamo.scheduling.router.collector.collector import PerformanceReport
from dynamo.scheduling.router.policies.adaptive_balancer import (
    Capacity,
    LoadBalancingError,
    LoadPredictionModel,
)
from dynamo.scheduling.router.policy import BasicPolicy, Decision, Policy
from dynamo.scheduling.router.router import WorkerRouter
from dynamo.scheduling.router.selectors import (
    DefaultWorkerSelector,
    RouterError,
    SelectionStrategy,
    WorkerScore,
    WorkerSelector,
)
from dynamo.telemetry.story import Candidate

if TYPE_CHECKING:
    from dynamo.library.adaptive_balancer import AdaptiveLoadBalancer, WorkerAssignment
    from dynamo.library.disaggregation_router import DisaggregationRouter, QueueStatus
    from dynamo.library.kv_indexer import KVIndexer
    from dynamo.library.kv_metrics_aggregator import KvMetricsAggregator
    from dynamo.library.kv_router import (
        CacheHitAnalysis,
        KvRouter,
        PerformanceRequirements,
        PrefixAnalysis,
        SchedulingRequest,
        WorkerSelectionResult,
        WorkerStatus,
    )
    from dynamo.library.routing_collector import RoutingMetricsCollector

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

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    homes = dict.fromkeys(__all__, "dynamo.library.kv_router") | {
        "AdaptiveLoadBalancer": "dynamo.library.adaptive_balancer",
        "DisaggregationRouter": "dynamo.library.disaggregation_router",
        "KVIndexer": "dynamo.library.kv_indexer",
        "KvMetricsAggregator": "dynamo.library.kv_metrics_aggregator",
        "QueueStatus": "dynamo.library.disaggregation_router",
        "RoutingMetricsCollector": "dynamo.library.routing_collector",
        "WorkerAssignment": "dynamo.library.adaptive_balancer",
    }
    __getattr__ = load_on_use(__name__, homes)
