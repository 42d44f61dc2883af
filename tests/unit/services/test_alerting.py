"""The alerts of a deployment, from the metrics of its supervisor and its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime.processes.supervisor_metrics import ScrapedProcess
from dynamo.services.alerting import DeploymentAlerts
from dynamo.telemetry import Registry


class RoundClock(SystemClock):
    """A clock on which each sleep is a round, with what happens before the next one."""

    def __init__(self, *rounds: Callable[[], object]) -> None:
        super().__init__()
        self._rounds = iter(rounds)
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        action = next(self._rounds, None)
        if action is None:
            raise asyncio.CancelledError
        action()


def settings_with(**alerts: object) -> Settings:
    settings = Settings()
    return replace(settings, alerts=replace(settings.alerts, **alerts))


async def test_a_death_is_an_alert_in_health_and_metrics() -> None:
    metrics, seen = Registry(), []
    deaths = metrics.counter("dynamo_supervisor_restarts_total", "", ("name", "child_role"))
    child = deaths.labels("worker-1", "worker")
    clock = RoundClock(child.inc, lambda: seen.append(metrics.render()))
    alerts = DeploymentAlerts(settings_with(interval=10.0), "d", clock)

    def list_processes() -> Sequence[ScrapedProcess]:
        return [ScrapedProcess("worker-1", "worker", "http://127.0.0.1:9")]

    with pytest.raises(asyncio.CancelledError):
        await alerts.run(metrics, list_processes)
    assert [alert["name"] for alert in alerts.list_active()] == ["WorkerLost"]
    assert 'dynamo_alert_active{alert="WorkerLost"} 1' in seen[0]
    assert 'dynamo_alert_active{alert="NoWorkers"} 0' in seen[0]
    assert 'dynamo_alert_failures_total{what="scrape"} 2' in seen[0]


async def test_without_an_interval_nothing_is_evaluated() -> None:
    alerts = DeploymentAlerts(settings_with(interval=0.0), "d", RoundClock())
    await alerts.run(Registry(), list)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"silenced": ("WorkerLots",)}, "there is no alert 'WorkerLots' to silence"),
        ({"webhook": "file:///etc/passwd"}, "is no URL of a server"),
    ],
)
def test_unknown_alerts_and_sinks_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DeploymentAlerts(settings_with(**values), "d", SystemClock())
