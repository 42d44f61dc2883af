"""Evaluation of alert rules over scraped metrics."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import nan

import msgspec

from dynamo.operations.alerts.conditions import AlertCondition, AlertRule, Series

Group = tuple[str, ...]
"""The values of the labels that a rule is evaluated by."""

FINE_S, COARSE_S = 600.0, 6 * 3600.0
MAX_AGE_S = 4 * 86_400.0
COARSE_STEPS = ((COARSE_S, 600.0), (FINE_S, 60.0))
"""Points older than each age are kept at this distance."""
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class MetricSample(msgspec.Struct, frozen=True):
    """A value of a metric, with the labels of its process."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def process(self) -> str:
        """The name of the process that has the metric."""
        return self.labels.get("process", "")

    @property
    def key(self) -> tuple[str, frozenset[tuple[str, str]]]:
        """The identity of the sample within a scrape."""
        return self.name, frozenset(self.labels.items())


class Firing(msgspec.Struct, frozen=True):
    """An alert that is active for a group of labels, with the value of its first condition."""

    rule: AlertRule
    labels: Mapping[str, str]
    value: float

    @property
    def key(self) -> tuple[str, Group]:
        """The identity of this alert among the active ones."""
        return self.rule.name, tuple(self.labels.values())


def parse_samples(
    text: str, names: frozenset[str], added: Mapping[str, str]
) -> Iterator[MetricSample]:
    """Yield the samples of these metrics in Prometheus' text format, with `added` labels."""
    for line in text.splitlines():
        if line[: min(end for mark in "{ " if (end := line.find(mark)) > 0)] not in names:
            continue
        match = _SAMPLE.match(line)
        if match is not None:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            yield MetricSample(match["name"], {**labels, **added}, float(match["value"]))


class CounterHistory:
    """The growth of a counter's sum over its series. A counter that decreases began again at 0, and
    so did a series that a known process begins. Older points are kept at larger distances."""

    def __init__(self) -> None:
        self._last: dict[object, float] = {}
        self._times: list[float] = []
        self._totals: list[float] = []
        self._total = 0.0

    def add(self, values: Mapping[object, float], known: Collection[object], now: float) -> None:
        """Add the values of a scrape by series. The `known` ones are of known processes."""
        for key, value in values.items():
            last = self._last.get(key, 0.0 if key in known else value)
            self._total += value - last if value >= last else value
        self._last.update(values)
        self._times.append(now)
        self._totals.append(self._total)
        self._thin(now)

    def growth(self, window_s: float, now: float) -> float | None:
        """Return the growth within the window, or None with fewer than two points in it."""
        start = max(0, bisect_right(self._times, now - window_s) - 1)
        if len(self._times) - start < 2:
            return None
        return self._total - self._totals[start]

    def _thin(self, now: float) -> None:
        """Drop the point that a coarser part of the history does not keep."""
        for age_s, step_s in COARSE_STEPS:
            index = bisect_right(self._times, now - age_s) - 1
            if index >= 2 and self._times[index] - self._times[index - 2] <= step_s:
                del self._times[index - 1], self._totals[index - 1]
        if self._times[0] < now - MAX_AGE_S:
            del self._times[0], self._totals[0]


class AlertEvaluator:
    """Evaluates rules on each scrape, with the meaning of Prometheus' `increase`, `by`, `and`, and
    `for`."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = rules
        self._series = {
            series.to_promql(rule.by): (series, rule.by)
            for rule in rules
            for condition in rule.conditions
            for series in condition.series
        }
        self.metrics = frozenset(series.metric for series, _ in self._series.values())
        """The names of the samples that the rules read."""
        self._histories: dict[tuple[str, Group], CounterHistory] = {}
        self._processes: set[str] = set()
        self._held_since: dict[tuple[str, Group], float] = {}

    def update(self, samples: Iterable[MetricSample], now: float) -> Sequence[Firing]:
        """Take the samples of a scrape at `now` (monotonic seconds). Returns the active alerts."""
        by_name: dict[str, list[MetricSample]] = {}
        for sample in samples:
            by_name.setdefault(sample.name, []).append(sample)
        values = {
            query: self._read(query, series, by, by_name.get(series.metric, ()), now)
            for query, (series, by) in self._series.items()
        }
        self._processes |= {each.process for samples in by_name.values() for each in samples}
        firing = list(chain.from_iterable(self._evaluate(rule, values) for rule in self._rules))
        held = {alert.key: self._held_since.get(alert.key, now) for alert in firing}
        self._held_since = held
        return [alert for alert in firing if now - held[alert.key] >= alert.rule.for_s]

    def _read(
        self, query: str, series: Series, by: Group, samples: Sequence[MetricSample], now: float
    ) -> Mapping[Group, float]:
        """Return the number of a series for each group."""
        groups: dict[Group, list[MetricSample]] = {}
        for sample in samples:
            if all(
                _pattern(pattern).fullmatch(sample.labels.get(label, ""))
                for label, pattern in series.where.items()
            ):
                group = tuple(sample.labels.get(label, "") for label in by)
                groups.setdefault(group, []).append(sample)
        if not series.window_s:
            return {group: _combine(series, of_group) for group, of_group in groups.items()}
        growths: dict[Group, float] = {}
        for group, of_group in groups.items():
            history = self._histories.setdefault((query, group), CounterHistory())
            known = {each.key for each in of_group if each.process in self._processes}
            history.add({each.key: each.value for each in of_group}, known, now)
            if (growth := history.growth(series.window_s, now)) is not None:
                growths[group] = growth
        return growths

    def _evaluate(
        self, rule: AlertRule, values: Mapping[str, Mapping[Group, float]]
    ) -> Iterator[Firing]:
        """Yield an alert for each group for which all conditions hold."""

        def read(series: Series | None) -> Mapping[Group, float]:
            return {} if series is None else values[series.to_promql(rule.by)]

        holding = [
            _holding(condition, *map(read, (condition.value, condition.minus, condition.over)))
            for condition in rule.conditions
        ]
        for group, value in holding[0].items():
            if all(group in other for other in holding[1:]):
                yield Firing(rule, dict(zip(rule.by, group, strict=True)), value)


def _holding(
    condition: AlertCondition,
    values: Mapping[Group, float],
    minus: Mapping[Group, float],
    over: Mapping[Group, float],
) -> Mapping[Group, float]:
    """Return the values of the groups for which a condition holds."""
    held: dict[Group, float] = {}
    for group, number in values.items():
        dividend = number if condition.minus is None else number - minus.get(group, nan)
        value = dividend
        if condition.over is not None:
            divisor = over.get(group, nan)
            value = dividend / divisor if divisor else nan
        if condition.breaks(value) and (not condition.least or dividend >= condition.least):
            held[group] = value
    return held


def _combine(series: Series, samples: Sequence[MetricSample]) -> float:
    if series.combine == "distinct":
        return len({sample.labels.get(series.label, "") for sample in samples})
    return _COMBINE[series.combine]([sample.value for sample in samples])


_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}


@lru_cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)
