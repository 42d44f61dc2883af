"""Operation of a deployment: machine checks, benchmarks, replays, router reports, configuration."""

from typing import TYPE_CHECKING

from dynamo.core.public_names import load_on_use

if TYPE_CHECKING:
    from dynamo.operations.alerts.notifications import AlertManager, AlertType
    from dynamo.operations.bench.bench import benchmark_latency
    from dynamo.operations.configure.sizing import calculate_optimal_tp, optimize_batch_size
    from dynamo.operations.monitoring import PerformanceMonitor
    from dynamo.operations.tuner.tuner import AutoTuner

__all__ = [
    "AlertManager",
    "AlertType",
    "AutoTuner",
    "PerformanceMonitor",
    "benchmark_latency",
    "calculate_optimal_tp",
    "optimize_batch_size",
]

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    homes = {
        "AlertManager": "dynamo.operations.alerts.notifications",
        "AlertType": "dynamo.operations.alerts.notifications",
        "PerformanceMonitor": "dynamo.operations.monitoring",
        "AutoTuner": "dynamo.operations.tuner.tuner",
        "benchmark_latency": "dynamo.operations.bench.bench",
        "calculate_optimal_tp": "dynamo.operations.configure.sizing",
        "optimize_batch_size": "dynamo.operations.configure.sizing",
    }
    __getattr__ = load_on_use(__name__, homes)
