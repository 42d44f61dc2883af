"""Metrics on our own arrays, rendered at scrape in Prometheus' text format.

`observe` costs about 0.2 us, so that a metric may stand on the path of a token.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

ScrapeCallback = Callable[[], float | Mapping[tuple[str, ...], float]]
"""Asked at scrape: one value, or values by label values."""

MergeMode = Literal["sum", "max"]

PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of what `Registry.render` gives."""

_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)
    kind = "counter"

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, n: float = 1) -> None:
        """Add `n`, which is not negative."""
        self.value += n


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)
    kind = "gauge"

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value

    def inc(self, n: float = 1) -> None:
        """Add `n`."""
        self.value += n

    def dec(self, n: float = 1) -> None:
        """Take `n` away."""
        self.value -= n


class Histogram:
    """Counts by upper bound (inclusive), their sum and number."""

    __slots__ = ("bounds", "counts", "sum")
    kind = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum: float = 0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count every one of `values`: bound by bound, which for many values takes less than one
        by one."""
        ordered, counts, below = sorted(values), self.counts, 0
        self.sum += sum(ordered)
        for index, bound in enumerate(self.bounds):
            upto = bisect_right(ordered, bound, below)
            counts[index] += upto - below
            below = upto
            if below == len(ordered):
                return
        counts[-1] += len(ordered) - below

    def observe_repeated(self, value: float, times: int) -> None:
        """Count the same value `times` times (a step's tokens)."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


Metric = Counter | Gauge | Histogram
M = TypeVar("M", bound=Metric)


class MetricFamily(Generic[M]):
    """One metric with labels: `labels("a", "b")` is its child, to be kept on hot paths."""

    def __init__(self, names: Sequence[str], make: Callable[[], M]) -> None:
        self.label_names = tuple(names)
        self._new_child = make
        self.children: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        """The child of these label values, made at first use."""
        child = self.children.get(values)
        if child is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"labels {self.label_names} wanted, {values} given")
            child = self.children[values] = self._new_child()
        return child

    def remove(self, *values: str) -> None:
        """Forget a child (an instance that left); a missing one is no error."""
        self.children.pop(values, None)


class _RegisteredMetric:
    __slots__ = ("callback", "help", "kind", "labels", "merge", "metric", "name")

    def __init__(
        self,
        name: str,
        text: str,
        metric: Any,
        *,
        kind: str,
        labels: tuple[str, ...],
        callback: ScrapeCallback | None,
        merge: MergeMode,
    ) -> None:
        self.name = name
        self.help = text
        self.metric = metric
        self.kind = kind
        self.labels = labels
        self.callback = callback
        self.merge = merge


class Registry:
    """The metrics of one process. Declaring a name again returns the metric that is there."""

    def __init__(self) -> None:
        self._metrics: dict[str, _RegisteredMetric] = {}

    @overload
    def counter(
        self, name: str, help: str, *, callback: ScrapeCallback | None = ...
    ) -> Counter: ...
    @overload
    def counter(
        self, name: str, help: str, labels: Sequence[str], *, callback: ScrapeCallback | None = ...
    ) -> MetricFamily[Counter]: ...
    def counter(
        self,
        name: str,
        help: str,  # noqa: A002 - Prometheus' word
        labels: Sequence[str] = (),
        *,
        callback: ScrapeCallback | None = None,
    ) -> Counter | MetricFamily[Counter]:
        """Declare a counter; `name` ends in `_total`."""
        found: Counter | MetricFamily[Counter] = self._register(
            name, help, Counter, labels, "counter", callback=callback
        )
        return found

    @overload
    def gauge(
        self, name: str, help: str, *, callback: ScrapeCallback | None = ..., merge: MergeMode = ...
    ) -> Gauge: ...
    @overload
    def gauge(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        *,
        callback: ScrapeCallback | None = ...,
        merge: MergeMode = ...,
    ) -> MetricFamily[Gauge]: ...
    def gauge(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Sequence[str] = (),
        *,
        callback: ScrapeCallback | None = None,
        merge: MergeMode = "sum",
    ) -> Gauge | MetricFamily[Gauge]:
        """Declare a gauge. `merge`: how the values of several processes become one; "max" for
        what every process sees alike (workers known)."""
        found: Gauge | MetricFamily[Gauge] = self._register(
            name, help, Gauge, labels, "gauge", callback=callback, merge=merge
        )
        return found

    @overload
    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram: ...
    @overload
    def histogram(
        self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str]
    ) -> MetricFamily[Histogram]: ...
    def histogram(
        self,
        name: str,
        help: str,  # noqa: A002
        buckets: Sequence[float],
        labels: Sequence[str] = (),
    ) -> Histogram | MetricFamily[Histogram]:
        """Declare a histogram with ascending upper bounds, without +Inf."""
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"{name}: bounds must ascend")
        found: Histogram | MetricFamily[Histogram] = self._register(
            name, help, lambda: Histogram(buckets), labels, "histogram"
        )
        return found

    def _register(
        self,
        name: str,
        text: str,
        make: Callable[[], Any],
        labels: Sequence[str],
        kind: str,
        *,
        callback: ScrapeCallback | None = None,
        merge: MergeMode = "sum",
    ) -> Any:
        names = tuple(labels)
        there = self._metrics.get(name)
        if there is not None:
            if (there.kind, there.labels) != (kind, names):
                raise ValueError(f"{name} is already a {there.kind} with labels {there.labels}")
            there.callback = callback or there.callback
            return there.metric
        if not _METRIC_NAME.match(name):
            raise ValueError(f"{name!r} is no metric name")
        metric = MetricFamily(names, make) if names else make()
        self._metrics[name] = _RegisteredMetric(
            name, text, metric, kind=kind, labels=names, callback=callback, merge=merge
        )
        return metric

    def render(self) -> str:
        """Everything in Prometheus' text format 0.0.4."""
        lines: list[str] = []
        for entry in self._metrics.values():
            lines.append(f"# HELP {entry.name} {_escape_help(entry.help)}")
            lines.append(f"# TYPE {entry.name} {entry.kind}")
            if entry.merge != "sum":
                lines.append(f"# MERGE {entry.name} {entry.merge}")
            for values, child in _label_values(entry):
                lines += _sample_lines(entry, values, child)
        return "\n".join(lines) + "\n"


def format_number(value: float) -> str:
    """A value as Prometheus writes it."""
    if value == float("inf"):
        return "+Inf"
    if value == float("-inf"):
        return "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)


def _label_values(entry: _RegisteredMetric) -> list[tuple[tuple[str, ...], Metric | float]]:
    if entry.callback is not None:
        asked = entry.callback()
        return list(asked.items()) if isinstance(asked, Mapping) else [((), asked)]
    if entry.labels:
        return list(entry.metric.children.items())
    return [((), entry.metric)]


def _sample_lines(
    entry: _RegisteredMetric, values: tuple[str, ...], child: Metric | float
) -> list[str]:
    pairs = [f'{name}="{_escape(value)}"' for name, value in zip(entry.labels, values, strict=True)]
    if not isinstance(child, Histogram):
        value = child if isinstance(child, int | float) else child.value
        return [f"{_series_name(entry.name, pairs)} {format_number(value)}"]
    lines = []
    total = 0
    for bound, count in zip([*child.bounds, float("inf")], child.counts, strict=True):
        total += count
        where = _series_name(f"{entry.name}_bucket", [*pairs, f'le="{format_number(bound)}"'])
        lines.append(f"{where} {total}")
    lines.append(f"{_series_name(f'{entry.name}_sum', pairs)} {format_number(child.sum)}")
    lines.append(f"{_series_name(f'{entry.name}_count', pairs)} {total}")
    return lines


def _series_name(name: str, pairs: Sequence[str]) -> str:
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def render_merged(texts: Sequence[str]) -> str:
    """Sum the samples of several Prometheus texts; gauges declared `merge="max"` take the largest.

    Order: as first seen. The texts are what `Registry.render` wrote.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    largest: set[str] = set()
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                _add_header(heads, family, line)
            elif line.startswith("# "):
                _add_header(heads, family, line)
                if line == f"# MERGE {family} max":
                    largest.add(family)
            elif line:
                name, _, value = line.rpartition(" ")
                _merge_sample(samples.setdefault(family, {}), name, float(value), family in largest)
    lines: list[str] = []
    for family, head in heads.items():
        lines += head
        lines += [
            f"{name} {format_number(value)}" for name, value in samples.get(family, {}).items()
        ]
    return "\n".join(lines) + "\n"


def _add_header(heads: dict[str, list[str]], family: str, line: str) -> None:
    known = heads.setdefault(family, [])
    if line not in known:
        known.append(line)


def _merge_sample(family: dict[str, float], name: str, value: float, largest: bool) -> None:
    if name not in family:
        family[name] = value
    elif largest:
        family[name] = max(family[name], value)
    else:
        family[name] += value
