"""`PerformanceMonitor` and `AlertManager`: five figures of a process by its metrics, for programs.

Prometheus watches deployments (docs/how-to/watch.md). Programs without it get the same figures.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.communication.http.client import HttpClient
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoError, PlaneUnavailable
from dynamo.core.tasks import run_all
from dynamo.core.values import read_field
from dynamo.operations.alerts.conditions import AlertRule
from dynamo.operations.alerts.evaluator import Firing
from dynamo.operations.alerts.notifications import AlertManager, AlertType
from dynamo.operations.running import sum_samples

if TYPE_CHECKING:
    from dynamo.operations.tuner.tuner import AutoTuner

log = logging.getLogger(__name__)

EWMA_WEIGHT = 0.3
Totals = Mapping[str, float]
"""The sums of counters over their labels, by name."""
ReadTotals = Callable[[], Awaitable[Totals]]


class MonitorConfig(msgspec.Struct, frozen=True):
    """The process to watch, by the address of its `/metrics`, and thresholds: in tokens/s, seconds,
    cores, a share and bytes/s. A threshold of 0 gives no alert."""

    metrics_url: str = "http://127.0.0.1:8000"
    throughput_monitor_interval: float = 15.0
    min_throughput_threshold: float = 0.0
    max_latency_threshold: float = 0.0
    max_resource_threshold: float = 0.0
    min_cache_hit_threshold: float = 0.0
    max_network_threshold: float = 0.0


class Monitor(msgspec.Struct, frozen=True):
    """A figure: the growth of a counter, over that of another one (""; over the time), and the
    threshold of `MonitorConfig` beyond which it alerts."""

    counter: str
    over: str
    threshold: str
    alert: AlertType


MONITORS: Mapping[str, Monitor] = {
    "throughput": Monitor(
        "dynamo_frontend_output_tokens_total",
        "",
        "min_throughput_threshold",
        AlertType.LOW_THROUGHPUT,
    ),
    "latency": Monitor(
        "dynamo_frontend_time_to_first_token_seconds_sum",
        "dynamo_frontend_time_to_first_token_seconds_count",
        "max_latency_threshold",
        AlertType.HIGH_LATENCY,
    ),
    "resources": Monitor(
        "process_cpu_seconds_total", "", "max_resource_threshold", AlertType.HIGH_RESOURCE_USAGE
    ),
    "cache": Monitor(
        "dynamo_frontend_cached_tokens_total",
        "dynamo_frontend_input_tokens_total",
        "min_cache_hit_threshold",
        AlertType.LOW_CACHE_HIT_RATIO,
    ),
    "network": Monitor(
        "dynamo_transfer_bytes_total", "", "max_network_threshold", AlertType.HIGH_NETWORK_USAGE
    ),
}


class PerformanceMonitor:
    """Measures five figures now and then, with moving averages, and alerts beyond thresholds."""

    def __init__(
        self,
        config: Any = None,
        read_totals: ReadTotals | None = None,
        auto_tuner: AutoTuner | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`config` has the fields of `MonitorConfig`; missing ones have its defaults."""
        defaults = MonitorConfig()
        self.config = MonitorConfig(
            **{
                name: read_field(config, name, default=getattr(defaults, name))
                for name in MonitorConfig.__struct_fields__
            }
        )
        self._clock = clock or SystemClock()
        self._read_totals = read_totals or self._scrape
        self.alert_manager = AlertManager(self._clock)
        self.auto_tuner = auto_tuner
        self.figures: dict[str, float] = {}
        self.moving_averages: dict[str, float] = {}
        self._before: tuple[float, Totals] | None = None

    async def start_monitoring(self) -> None:
        """Measure until cancelled, and let the tuner run if there is one with an interval."""
        tuner = self.auto_tuner
        if tuner is None or not tuner.config.auto_tune_interval:
            await self._run()
        else:
            await run_all(self._run(), tuner.run())

    async def measure(self) -> Mapping[str, float]:
        """Return the figures since the last call, and alert. Empty at the first call, and without
        those that had nothing to count. Raises `PlaneUnavailable`."""
        now, totals = self._clock.now(), await self._read_totals()
        before, self._before = self._before, (now, totals)
        if before is None:
            return {}
        seconds, earlier = now - before[0], before[1]
        self.figures = {}
        for name, monitor in MONITORS.items():
            growth = totals.get(monitor.counter, 0.0) - earlier.get(monitor.counter, 0.0)
            over = seconds
            if monitor.over:
                over = totals.get(monitor.over, 0.0) - earlier.get(monitor.over, 0.0)
            if over > 0 and growth >= 0:  # a process that was started again counts from 0
                self._update(name, growth / over)
        await self.alert_manager.update(list(self._firing()))
        return self.figures

    def _update(self, name: str, value: float) -> None:
        self.figures[name] = value
        average = self.moving_averages.get(name, value)
        self.moving_averages[name] = average + EWMA_WEIGHT * (value - average)

    def _firing(self) -> Iterator[Firing]:
        """Yield an alert for each figure beyond its threshold."""
        for name, value in self.figures.items():
            monitor = MONITORS[name]
            threshold = getattr(self.config, monitor.threshold)
            below = monitor.threshold.startswith("min_")
            if threshold and (value < threshold if below else value > threshold):
                text = f"{name} {value:.4g} is {'below' if below else 'above'} {threshold:.4g}"
                yield Firing(AlertRule(monitor.alert.value, "ticket", (), text, ""), {}, value)

    async def _run(self) -> None:
        while True:
            try:
                await self.measure()
            except DynamoError as error:
                log.warning("nothing is measured", extra={"fields": {"error": error.message}})
            await self._clock.sleep(self.config.throughput_monitor_interval)

    async def _scrape(self) -> Totals:
        url = self.config.metrics_url
        try:
            with closing(HttpClient(url, {}, None)) as client:
                answer = await client.send("GET", "/metrics")
        except (OSError, TimeoutError) as error:
            raise PlaneUnavailable(f"{url} tells no metrics: {error or 'timeout'}") from None
        return sum_samples(answer.body.decode())
