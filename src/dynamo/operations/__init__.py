"""Operation of a deployment: machine checks, benchmarks, replays and router reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.operations.bench.latency import benchmark_latency

__all__ = ["benchmark_latency"]


def __getattr__(name: str) -> Any:
    """Import public names on first use."""
    if name == "benchmark_latency":
        from dynamo.operations.bench.latency import benchmark_latency

        return benchmark_latency
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
