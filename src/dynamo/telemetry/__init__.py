"""Logs and metrics."""

from dynamo.telemetry.merge import render_merged
from dynamo.telemetry.metrics import Counter, Gauge, Histogram, MetricFamily, Registry

__all__ = ["Counter", "Gauge", "Histogram", "MetricFamily", "Registry", "render_merged"]
