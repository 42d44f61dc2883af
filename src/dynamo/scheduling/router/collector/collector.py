"""The collector of routing decisions: keeps the last ones, and makes reports and alerts."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from math import inf
from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest
from dynamo.scheduling.router.collector.report import (
    ALERT_RULES,
    Aggregates,
    Bottleneck,
    RoutingRecord,
    Trend,
    aggregate,
    compute_trends,
    find_bottlenecks,
    pack_record,
    recommend,
    summarize,
    unpack_record,
)
from dynamo.telemetry.logs import request_id

log = logging.getLogger(__name__)


class CollectorConfig(msgspec.Struct, frozen=True):
    """Keep `buffer_size` decisions. Every `check_s`, alerts are computed from the last `window_s`.
    A check needs `min_decisions` and reads at most the last `max_decisions`, which takes less than
    a millisecond. `thresholds` overrides single rules by name."""

    buffer_size: int = 10_000
    window_s: float = 60.0
    check_s: float = 5.0
    min_decisions: int = 20
    max_decisions: int = 128
    thresholds: dict[str, float] = {}


class Alert(msgspec.Struct, frozen=True):
    """A rule that is broken since the Unix time `since`."""

    name: str
    message: str
    value: float
    threshold: float
    since: float


class PerformanceReport(msgspec.Struct, frozen=True):
    """A report on the decisions in `time_range`, Unix seconds (from, to). `trends` compare the
    second half with the first. `bottlenecks` are broken rules, worst first; `recommendations` say
    what to do about them."""

    time_range: tuple[float, float]
    aggregated_metrics: Aggregates
    trends: dict[str, Trend]
    bottlenecks: list[Bottleneck]
    recommendations: list[str]
    raw_data_summary: dict[str, Any]
    alerts: list[Alert] = []


class DecisionCollector:
    """A bounded buffer of records, packed to 150 bytes each (420 as objects)."""

    def __init__(
        self,
        config: CollectorConfig | None = None,
        *,
        wall: Callable[[], float] = time.time,
        workers: int = 0,
    ) -> None:
        """`workers` is the number of live workers, including workers that were never chosen."""
        self.config = config = config or CollectorConfig()
        self.workers = workers
        self._wall = wall
        self._buffer: deque[bytes] = deque(maxlen=config.buffer_size)
        self._alerts: dict[str, Alert] = {}
        self._last_check_s = 0.0

    @property
    def alerts(self) -> Sequence[Alert]:
        """The current alerts, oldest first."""
        return tuple(self._alerts.values())

    def record(self, record: RoutingRecord) -> None:
        """Add a record. Every `check_s`, alerts are checked too."""
        self._buffer.append(pack_record(record))
        if record.timestamp - self._last_check_s >= self.config.check_s:
            self._last_check_s = record.timestamp
            # An alert is about many requests, so its log line has no request's id.
            copy_context().run(self._check_without_request_id, record.timestamp)

    def report(self, time_range: tuple[float, float] | float | None = None) -> PerformanceReport:
        """Report on a range of Unix times, on the last `time_range` seconds, or on all records.
        The call takes some milliseconds and may run in a thread. Raises `InvalidRequest` for
        anything else."""
        now = self._wall()
        if isinstance(time_range, int | float):
            time_range = (now - time_range, now)
        try:
            start, end = map(float, time_range or (0.0, inf))
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"{time_range!r} is no range of time",
                hint="pass seconds, such as 3600, or (start, end) as Unix times",
                field="time_range",
            ) from None
        records = self.records_between(start, end)
        first = records[0].timestamp if records else now
        if not time_range:
            start, end = first, now
        metrics = aggregate(records, end - start, self.workers)
        bottlenecks = find_bottlenecks(metrics, self.config.thresholds)
        trends = compute_trends(records, start, end)
        return PerformanceReport(
            time_range=(start, end),
            aggregated_metrics=metrics,
            trends=trends,
            bottlenecks=bottlenecks,
            recommendations=recommend(metrics, trends, bottlenecks),
            raw_data_summary=summarize(records),
            alerts=list(self.alerts),
        )

    def check(self, now: float) -> None:
        """Begin and end alerts from the records of the last `window_s`; too few records end all."""
        last = self._packed(now - self.config.window_s, now)[-self.config.max_decisions :]
        records = tuple(map(unpack_record, last))
        bottlenecks: list[Bottleneck] = []
        if records and len(records) >= self.config.min_decisions:
            metrics = aggregate(records, now - records[0].timestamp, self.workers)
            bottlenecks = find_bottlenecks(metrics, self.config.thresholds)
        names = {broken.name for broken in bottlenecks}
        for name in [name for name in self._alerts if name not in names]:
            del self._alerts[name]
            log.info("routing alert ended", extra={"fields": {"alert": name}})
        for broken in bottlenecks:
            before = self._alerts.get(broken.name)
            since = now if before is None else before.since
            alert = Alert(broken.name, broken.evidence, broken.value, broken.threshold, since)
            self._alerts[broken.name] = alert
            if before is None:
                self._raise_alert(alert)

    def _check_without_request_id(self, now: float) -> None:
        request_id.set("")
        self.check(now)

    def alert_ratios(self) -> Mapping[tuple[str, ...], float]:
        """Return value over threshold for each broken rule and 0 for the others, for a gauge."""
        alerts = self._alerts
        return {
            (name,): alerts[name].value / max(alerts[name].threshold, 1e-9) if name in alerts else 0
            for name in ALERT_RULES
        }

    def _raise_alert(self, alert: Alert) -> None:
        """Note a new alert."""
        fields = {"alert": alert.name, "value": round(alert.value, 4), "evidence": alert.message}
        log.warning("routing alert", extra={"fields": fields})

    def records_between(self, start: float, end: float) -> tuple[RoutingRecord, ...]:
        """Return the records of a range of Unix times, in order. Call in a thread, since 10,000
        records take 7 ms; the buffer is copied in one atomic step."""
        return tuple(map(unpack_record, self._packed(start, end)))

    def _packed(self, start: float, end: float) -> tuple[bytes, ...]:
        records = tuple(self._buffer)
        first = bisect_left(records, start, key=_timestamp)
        return records[first : bisect_right(records, end, key=_timestamp)]


def _timestamp(packed: bytes) -> float:
    return unpack_record(packed).timestamp
