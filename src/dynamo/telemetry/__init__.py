"""Logs, metrics and health reports."""

from dynamo.telemetry.metrics import (
    Counter,
    Gauge,
    Histogram,
    MetricFamily,
    Registry,
    render_merged,
)

__all__ = ["Counter", "Gauge", "Histogram", "MetricFamily", "Registry", "render_merged"]
