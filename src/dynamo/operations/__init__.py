"""Operation of a deployment: machine checks, benchmarks, replays and router reports."""

from typing import TYPE_CHECKING

from dynamo.core.public_names import load_on_use

if TYPE_CHECKING:
    from dynamo.operations.bench.bench import benchmark_latency

__all__ = ["benchmark_latency"]

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    homes = {"benchmark_latency": "dynamo.operations.bench.bench"}
    __getattr__ = load_on_use(__name__, homes)
