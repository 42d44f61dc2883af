"""Sections of logs, alerts, and metrics."""

from __future__ import annotations

from dynamo.core.settings.declare import SettingsSection, setting


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
        "run the program `prometheus` of PATH beside the frontends, on loopback. It scrapes all "
        "processes and evaluates the rules of alerts; its data is in the state folder",
        aliases=("distributed_runtime.metrics.enable_prometheus",),
    )
    port: int = setting(
        9090,
        "its port",
        ge=1,
        le=65535,
        aliases=("distributed_runtime.metrics.prometheus_port",),
    )
    scrape_interval: float = setting(
        15.0,
        "time between scrapes, and between evaluations of rules",
        unit="seconds",
        ge=1,
        aliases=("distributed_runtime.metrics.collection_interval",),
    )


class MonitoringSettings(SettingsSection, frozen=True):
    """Collection and display of metrics."""

    prometheus: PrometheusSettings = PrometheusSettings()
