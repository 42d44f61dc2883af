"""`PerformanceMonitor` and `AlertManager`: figures by metrics, moving averages and alerts."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.errors import PlaneUnavailable
from dynamo.operations import AlertManager, AlertType, PerformanceMonitor

FRONTEND = "dynamo_frontend_"


class StepClock(SystemClock):
    """A clock on which ten seconds pass between two readings, and which sleeps twice."""

    def __init__(self) -> None:
        super().__init__()
        self._now, self._sleeps = 0.0, 0

    def now(self) -> float:
        self._now += 10.0
        return self._now

    async def sleep(self, seconds: float) -> None:
        assert seconds == 5.0
        self._sleeps += 1
        if self._sleeps > 2:
            raise asyncio.CancelledError


class Metrics:
    """Counters that grow by the same at each reading, and fail now and then."""

    def __init__(self, output: float = 500.0, fails_at: int = -1) -> None:
        self._reads, self._output, self._fails_at = 0, output, fails_at

    async def read(self) -> dict[str, float]:
        self._reads += 1
        if self._reads == self._fails_at:
            raise PlaneUnavailable("the frontend is away")
        growth = {
            f"{FRONTEND}output_tokens_total": self._output,
            f"{FRONTEND}input_tokens_total": 1000.0,
            f"{FRONTEND}cached_tokens_total": 250.0,
            f"{FRONTEND}time_to_first_token_seconds_sum": 3.0,
            f"{FRONTEND}time_to_first_token_seconds_count": 6.0,
            "process_cpu_seconds_total": 2.0,
        }
        return {name: value * self._reads for name, value in growth.items()}


async def test_figures_are_rates_and_shares() -> None:
    monitor = PerformanceMonitor(read_totals=Metrics().read, clock=StepClock())
    assert await monitor.measure() == {}
    figures = {
        "throughput": 50.0, "latency": 0.5, "resources": 0.2, "cache": 0.25, "network": 0.0,
    }  # fmt: skip
    assert await monitor.measure() == pytest.approx(figures)
    assert monitor.moving_averages == pytest.approx(figures)
    assert not monitor.alert_manager.alerts


async def test_what_is_beyond_a_threshold_alerts(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(
        min_throughput_threshold=60.0, max_latency_threshold=0.4, throughput_monitor_interval=5.0
    )
    monitor = PerformanceMonitor(config, Metrics(fails_at=2).read, clock=StepClock())
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await monitor.start_monitoring()
    alerts = monitor.alert_manager.alerts
    assert {alert.name: alert.message for alert in alerts} == {
        "low_throughput": "throughput 50 is below 60",
        "high_latency": "latency 0.5 is above 0.4",
    }
    assert "nothing is measured" in caplog.text


async def test_counters_that_begin_again_give_no_figure() -> None:
    readings = iter([{"process_cpu_seconds_total": 9.0}, {"process_cpu_seconds_total": 1.0}])

    async def read() -> dict[str, float]:
        return next(readings)

    monitor = PerformanceMonitor(read_totals=read, clock=StepClock())
    await monitor.measure()
    assert "resources" not in await monitor.measure()


async def test_an_alert_is_kept_and_an_absent_process_named() -> None:
    manager = AlertManager()
    await manager.send_alert(AlertType.LOW_THROUGHPUT, "too few tokens")
    assert manager.alerts[0].message == "too few tokens"
    with pytest.raises(PlaneUnavailable, match=r"http://127\.0\.0\.1:9 tells no metrics"):
        await PerformanceMonitor({"metrics_url": "http://127.0.0.1:9"}).measure()
