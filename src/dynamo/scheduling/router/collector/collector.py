"""What routing did, over time: the last decisions in a buffer, reports and alerts from them."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from dynamo.scheduling.router.collector.record import RoutingRecord, pack_record, unpack_record
from dynamo.scheduling.router.collector.report import (
    Aggregates,
    Bottleneck,
    Trend,
    aggregate,
    compute_trends,
    recommend,
    summarize,
)
from dynamo.scheduling.router.collector.rules import ALERT_RULES, find_bottlenecks

log = logging.getLogger(__name__)


class CollectorConfig(msgspec.Struct, frozen=True):
    """`buffer_size`: decisions kept; alerts look at the last `window_s`, every `check_s`, once
    `least` decisions are there, and at no more than the last `most`, which takes under a
    millisecond; `thresholds` replaces those of single rules, by name."""

    buffer_size: int = 10_000
    window_s: float = 60.0
    check_s: float = 5.0
    min_decisions: int = 20
    max_decisions: int = 128
    thresholds: dict[str, float] = {}


class Alert(msgspec.Struct, frozen=True):
    """A rule that is broken now. `since`: Unix time."""

    name: str
    message: str
    value: float
    threshold: float
    since: float


class PerformanceReport(msgspec.Struct, frozen=True):
    """Routing in `time_range` (Unix seconds from, to). `aggregated_metrics`: by aggregator;
    `trends`: how the second half differs from the first; `recommendations`: what to do about the
    `bottlenecks`, worst first."""

    time_range: tuple[float, float]
    aggregated_metrics: Aggregates
    trends: dict[str, Trend]
    bottlenecks: list[Bottleneck]
    recommendations: list[str]
    raw_data_summary: dict[str, Any]
    alerts: list[Alert] = []


class RoutingMetricsCollector:
    """Bounded by `buffer_size`; records are kept packed, at 150 bytes each in place of 420.
    `config`: a `CollectorConfig`, or anything with a `buffer_size`."""

    def __init__(
        self, config: Any = None, *, wall: Callable[[], float] = time.time, workers: int = 0
    ) -> None:
        """`workers`: how many there are, where some may never be chosen."""
        if not isinstance(config, CollectorConfig):
            config = CollectorConfig(getattr(config, "buffer_size", CollectorConfig().buffer_size))
        self.config: CollectorConfig = config
        self.workers = workers
        self._wall = wall
        self._buffer: deque[bytes] = deque(maxlen=config.buffer_size)
        self._alerts: dict[str, Alert] = {}
        self._listeners: list[Callable[[Alert], None]] = []
        self._checked = 0.0

    @property
    def alerts(self) -> Sequence[Alert]:
        """What is wrong now, oldest first."""
        return tuple(self._alerts.values())

    def on_alert(self, listener: Callable[[Alert], None]) -> None:
        """Call `listener` with every alert when it begins."""
        self._listeners.append(listener)

    def record(self, record: RoutingRecord) -> None:
        """Keep one decision; cheap."""
        self._buffer.append(pack_record(record))
        if record.timestamp - self._checked >= self.config.check_s:
            self._checked = record.timestamp
            self.check(record.timestamp)

    async def record_routing_decision(self, decision_context: Any) -> None:
        """Keep what any object with these attributes tells: request_id, selected_worker (an id, or
        something with one), cache_hit_ratio, decision_time, worker_load, queue_length."""
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
        """`report`, as a coroutine."""
        return self.report(time_range)

    def report(self, time_range: tuple[float, float] | float | None = None) -> PerformanceReport:
        """Of the records between two Unix times, of the last so many seconds, or of all kept. Some
        milliseconds: may be asked in a thread."""
        now = self._wall()
        if isinstance(time_range, int | float):
            time_range = (now - time_range, now)
        records = self.records_between(*(time_range or (0.0, inf)))
        first = records[0].timestamp if records else now
        start, end = time_range or (first, now)
        metrics = aggregate(records, end - start, self.workers)
        found = find_bottlenecks(metrics, self.config.thresholds)
        tendencies = compute_trends(records, start, end)
        return PerformanceReport(
            time_range=(start, end),
            aggregated_metrics=metrics,
            trends=tendencies,
            bottlenecks=found,
            recommendations=recommend(metrics, tendencies, found),
            raw_data_summary=summarize(records),
            alerts=list(self.alerts),
        )

    def with_records(self, records: Sequence[RoutingRecord]) -> RoutingMetricsCollector:
        """Another collector like this one, alerts included, of other records (in order of time)."""
        made = RoutingMetricsCollector(self.config, wall=self._wall, workers=self.workers)
        made._buffer = deque(map(pack_record, records))
        made._alerts = dict(self._alerts)
        return made

    def check(self, now: float) -> None:
        """Begin and end alerts by what the last `window_s` tell."""
        last = self._packed(now - self.config.window_s, now)[-self.config.max_decisions :]
        records = tuple(map(unpack_record, last))
        if len(records) < self.config.min_decisions:
            self._alerts.clear()
            return
        metrics = aggregate(records, now - records[0].timestamp, self.workers)
        found = {one.name: one for one in find_bottlenecks(metrics, self.config.thresholds)}
        for name in [name for name in self._alerts if name not in found]:
            del self._alerts[name]
            log.info("routing is well again", extra={"fields": {"alert": name}})
        for name, one in found.items():
            since = self._alerts[name].since if name in self._alerts else now
            alert = Alert(name, one.evidence, one.value, one.threshold, since)
            new = name not in self._alerts
            self._alerts[name] = alert
            if new:
                self._raise_alert(alert)

    def alert_ratios(self) -> Mapping[tuple[str, ...], float]:
        """By rule: its value over its threshold where it is broken, else 0; for a gauge."""
        alerts = self._alerts
        return {
            (name,): alerts[name].value / max(alerts[name].threshold, 1e-9) if name in alerts else 0
            for name in ALERT_RULES
        }

    def _raise_alert(self, alert: Alert) -> None:
        fields = {"alert": alert.name, "value": round(alert.value, 4), "evidence": alert.message}
        log.warning("routing alert", extra={"fields": fields})
        for listener in self._listeners:
            listener(alert)

    def records_between(self, start: float, end: float) -> tuple[RoutingRecord, ...]:
        """Records of that Unix time, in order. The copy is made in one step: let a thread ask, as
        10,000 records take 7 ms."""
        return tuple(map(unpack_record, self._packed(start, end)))

    def _packed(self, start: float, end: float) -> tuple[bytes, ...]:
        kept = tuple(self._buffer)
        first = bisect_left(kept, start, key=_timestamp)
        return kept[first : bisect_right(kept, end, key=_timestamp)]


def _timestamp(packed: bytes) -> float:
    return unpack_record(packed).timestamp
