"""Alerts of a deployment: its supervisor reads the metrics of its processes and evaluates rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.communication.http.scrape import scrape
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError, PlaneUnavailable
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all
from dynamo.operations.alerts.evaluator import AlertEvaluator, MetricSample, parse_samples
from dynamo.operations.alerts.notifications import AlertManager
from dynamo.operations.alerts.rules import RULES
from dynamo.runtime.processes.supervisor_metrics import ScrapedProcess
from dynamo.telemetry import Registry


class DeploymentAlerts:
    """Evaluates the rules every `alerts.interval` and keeps the active alerts. A supervisor reads
    its own processes only, so several supervisors of a namespace send no alert twice."""

    def __init__(self, settings: Settings, deployment: str, clock: Clock) -> None:
        """Raises `ConfigError` for sinks and names that cannot be used."""
        check_alerts(settings)
        self._settings = settings.alerts
        self._deployment = deployment
        self._clock = clock
        self._evaluator = AlertEvaluator(RULES)
        self._manager = AlertManager(clock, settings, deployment)
        self._failed_scrapes = 0

    async def run(
        self, metrics: Registry, list_processes: Callable[[], Sequence[ScrapedProcess]]
    ) -> None:
        """Evaluate until cancelled."""
        self._declare_metrics(metrics)
        while self._settings.interval:
            own = self._parse(metrics.render(), "supervisor", "supervisor")
            scraped = await run_all(*map(self._scrape, list_processes()))
            samples = [sample for each in (own, *scraped) for sample in each]
            await self._manager.update(self._evaluator.update(samples, self._clock.now()))
            await self._clock.sleep(self._settings.interval)

    def list_active(self) -> Sequence[Mapping[str, Any]]:
        """Return the active alerts with the fields of `ActiveAlert`."""
        return [msgspec.to_builtins(alert) for alert in self._manager.active.values()]

    async def _scrape(self, process: ScrapedProcess) -> Sequence[MetricSample]:
        """Return the metrics of a process. A process that does not answer is counted."""
        try:
            text = await scrape(process.status_url)
        except PlaneUnavailable:
            self._failed_scrapes += 1
            return ()
        return self._parse(text, process.name, process.role)

    def _parse(self, text: str, name: str, role: str) -> Sequence[MetricSample]:
        labels = {"process": name, "role": role, "deployment": self._deployment}
        return list(parse_samples(text, self._evaluator.metrics, labels))

    def _declare_metrics(self, metrics: Registry) -> None:
        def count_active() -> Mapping[tuple[str, ...], float]:
            names = {alert.name for alert in self._manager.active.values()}
            return {(rule.name,): float(rule.name in names) for rule in RULES}

        metrics.gauge(
            "dynamo_alert_active",
            "1 while an alert is active, otherwise 0",
            ("alert",),
            callback=count_active,
        )
        metrics.counter(
            "dynamo_alert_failures_total",
            "Processes whose metrics alerts could not read, and notifications that were not sent",
            ("what",),
            callback=lambda: {
                ("scrape",): self._failed_scrapes,
                ("notification",): self._manager.failed_notifications,
            },
        )


def check_alerts(settings: Settings) -> None:
    """Raise `ConfigError` for a webhook that is no URL, and for an unknown name of an alert."""
    alerts = settings.alerts
    if alerts.webhook and not alerts.webhook.startswith(("http://", "https://")):
        raise ConfigError(
            "alerts.webhook is no URL of a server",
            hint="e.g. https://hooks.example.com/alerts",
            param="alerts.webhook",
        )
    names = [rule.name for rule in RULES]
    for name in alerts.silenced:
        if name not in names:
            raise ConfigError(
                f"there is no alert {name!r} to silence",
                hint=f"the alerts are: {', '.join(names)}",
                param="alerts.silenced",
            )
