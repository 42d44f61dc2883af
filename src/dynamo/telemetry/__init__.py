"""Logs and metrics."""

from dynamo.telemetry.merge import render_merged
from dynamo.telemetry.metrics import Counter, Family, Gauge, Histogram, Registry

__all__ = ["Counter", "Family", "Gauge", "Histogram", "Registry", "render_merged"]
