"""Sections of logs, alerts, and metrics."""

from __future__ import annotations

from dynamo.core.settings.declare import SettingsSection, setting

_METRICS = "distributed_runtime.metrics"


class LoggingSettings(SettingsSection, frozen=True):
    """Log lines."""

    level: str = setting(
        "info",
        "level, or levels by module in RUST_LOG's syntax (`info,dynamo.scheduling=debug`)",
        flag="--log-level",
        aliases=("server.log_level",),
        reload=True,
    )
    format: str = setting(
        "text", "format of log lines", flag="--log-format", choices=("text", "json")
    )
    output: str = setting(
        "stderr",
        "destination of log lines: stderr, stdout, or the path of a file, of which five older "
        "parts of 64 MiB are kept",
    )


class AlertsSettings(SettingsSection, frozen=True):
    """Alerts, which each supervisor derives from the metrics of its processes."""

    interval: float = setting(
        10.0, "time between evaluations; 0: none", unit="seconds", ge=0, le=60
    )
    webhook: str = setting(
        "",
        "http or https URL that gets a notification when alerts begin and end, as Alertmanager "
        "sends it",
        secret=True,
    )
    command: str = setting(
        "", "program that is run for each notification, which it reads as JSON on standard input"
    )
    silenced: tuple[str, ...] = setting((), "names of alerts that send no notification")


class PrometheusSettings(SettingsSection, frozen=True):
    """A Prometheus that the deployment runs."""

    enabled: bool = setting(
        False,
        "run the program `prometheus` of PATH on loopback, beside the frontends; its data is in "
        "the state folder",
        aliases=(f"{_METRICS}.enable_prometheus",),
    )
    port: int = setting(9090, "its port", ge=1, le=65535, aliases=(f"{_METRICS}.prometheus_port",))
    scrape_interval: float = setting(
        15.0,
        "time between scrapes",
        unit="seconds",
        ge=1,
        aliases=(f"{_METRICS}.collection_interval",),
    )


CUSTOM_METRIC_SOURCES = {
    "request_duration": "histogram",
    "time_to_first_token": "histogram",
    "inter_token_latency": "histogram",
    "cache_hit_ratio": "gauge",
    "gpu_utilization": "gauge",
}
"""The kind of metric of each value that custom metrics can show."""
_KINDS = ("counter", "gauge", "histogram")


class CustomMetricSettings(SettingsSection, frozen=True):
    """A metric that shows a source under another name, or in other buckets."""

    name: str = setting("", "name of the metric")
    type: str | None = setting(None, "kind of metric; unset: that of its source", choices=_KINDS)
    buckets: tuple[float, ...] = setting((), "upper bounds of a histogram; empty: Dynamo's own")
    source: str = setting(
        "",
        f"what it shows: {', '.join(CUSTOM_METRIC_SOURCES)}; empty: what `name` says, which is one "
        "of these or request_latency_p99 (request_duration)",
    )

    @property
    def shows(self) -> str:
        """The source."""
        default = "request_duration" if self.name == "request_latency_p99" else self.name
        return self.source or default


class MonitoringSettings(SettingsSection, frozen=True):
    """Collection and display of metrics."""

    prometheus: PrometheusSettings = PrometheusSettings()
    custom_metrics: tuple[CustomMetricSettings, ...] = setting((), "metrics besides Dynamo's")
