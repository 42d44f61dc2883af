"""The collector of routing decisions for programs that decide themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dynamo.scheduling.router.collector.collector import (
    Alert,
    CollectorConfig,
    DecisionCollector,
    PerformanceReport,
)
from dynamo.scheduling.router.collector.report import RoutingRecord


class RoutingMetricsCollector(DecisionCollector):
    """Collect decisions and report on them. `config` is a CollectorConfig or any object with a
    `buffer_size`."""

    def __init__(
        self, config: Any = None, *, wall: Callable[[], float] = time.time, workers: int = 0
    ) -> None:
        if not isinstance(config, CollectorConfig):
            config = CollectorConfig(getattr(config, "buffer_size", CollectorConfig().buffer_size))
        super().__init__(config, wall=wall, workers=workers)
        self._listeners: list[Callable[[Alert], None]] = []

    def on_alert(self, listener: Callable[[Alert], None]) -> None:
        """Call `listener` once with each new alert."""
        self._listeners.append(listener)

    def _raise_alert(self, alert: Alert) -> None:
        super()._raise_alert(alert)
        for listener in self._listeners:
            listener(alert)

    async def record_routing_decision(self, decision_context: Any) -> None:
        """Add a decision from any object with these attributes: request_id, selected_worker (an id
        or an object with one), cache_hit_ratio, decision_time, worker_load, queue_length."""
        worker = decision_context.selected_worker
        self.record(
            RoutingRecord(
                timestamp=self._wall(),
                request_id=decision_context.request_id,
                selected_worker=str(getattr(worker, "id", worker)),
                cache_hit_ratio=decision_context.cache_hit_ratio,
                decision_latency=decision_context.decision_time,
                worker_load=decision_context.worker_load,
                queue_length=decision_context.queue_length,
            )
        )

    async def generate_performance_report(
        self, time_range: tuple[float, float] | float | None = None
    ) -> PerformanceReport:
        """Call `report`. The name is that of Dynamo's documents."""
        return self.report(time_range)
