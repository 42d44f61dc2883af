"""Metrics, rendered in Prometheus' text format at each scrape.

`observe` costs about 0.2 us, so a metric may be updated for each token.
"""

# ruff: noqa: A002 (`help` is Prometheus' word)
from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, overload

import msgspec

log = logging.getLogger(__name__)
T = TypeVar("T")

ScrapeCallback = Callable[[], "float | Mapping[tuple[str, ...], float | Histogram]"]
"""Called at each scrape. Returns the value, or values by label values."""

Exemplar = tuple[Mapping[str, str], float]
"""Labels of an example, and its Unix time."""

MergeMode = Literal["sum", "max", "min"]

_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class Counter:
    """A number that only increases."""

    __slots__ = ("value",)
    kind = "counter"

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, n: float = 1) -> None:
        """Add `n`, which must not be negative."""
        self.value += n


class Gauge:
    """A number that may increase and decrease."""

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
        """Subtract `n`."""
        self.value -= n


class Histogram:
    """Counts values by inclusive upper bound. `counts` has one more entry, for +Inf. `exemplars`:
    the last value that was named in a bucket, with its labels and Unix time."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")
    kind = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum: float = 0
        self.exemplars: dict[int, tuple[float, Exemplar]] = {}

    def set_exemplar(self, value: float, exemplar: Exemplar) -> None:
        """Name a value that was counted, for OpenMetrics."""
        self.exemplars[bisect_left(self.bounds, value)] = value, exemplar

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float], scale: float = 1) -> None:
        """Count all `values`, bucket by bucket. For many values this is faster than `observe`.
        Values are `scale` times those of the metric."""
        ordered, counts, start = sorted(values), self.counts, 0
        self.sum += sum(ordered) / scale
        for index, bound in enumerate(self.bounds):
            end = bisect_right(ordered, bound * scale, start)
            counts[index] += end - start
            start = end
            if start == len(ordered):
                return
        counts[-1] += len(ordered) - start


Metric = Counter | Gauge | Histogram
M = TypeVar("M", bound=Metric)


class MetricFamily(Generic[M]):
    """A metric with labels. Hot paths should keep the child that `labels("a", "b")` returns."""

    def __init__(self, names: Sequence[str], make: Callable[[], M]) -> None:
        self.label_names = tuple(names)
        self.new_child = make
        self.children: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        """Return the child of these label values, created on first use."""
        child = self.children.get(values)
        if child is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"expected values of labels {self.label_names}, got {values}")
            child = self.children[values] = self.new_child()
        return child

    def remove(self, *values: str) -> None:
        """Remove a child if it exists, for example of an instance that left."""
        self.children.pop(values, None)


class _RegisteredMetric(msgspec.Struct):
    name: str
    help: str
    metric: Any
    kind: str
    labels: tuple[str, ...]
    callback: ScrapeCallback | None
    merge: MergeMode
    callbacks_by_model: dict[str, ScrapeCallback] = {}


class _Options(TypedDict, total=False):
    """`merge`: "max" or "min" for gauges whose sum over processes means nothing."""

    callback: ScrapeCallback | None
    merge: MergeMode


class Registry:
    """The metrics of one process. A second declaration of a name returns the existing metric."""

    def __init__(self) -> None:
        self._metrics: dict[str, _RegisteredMetric] = {}
        self._before_scrape: list[Callable[[], object]] = []
        self._texts: list[Callable[[], str]] = []

    def before_scrape(self, callback: Callable[[], object]) -> None:
        """Call `callback` before each scrape. Its failure is logged."""
        self._before_scrape.append(callback)

    def add_text(self, source: Callable[[], str]) -> None:
        """Add the text that `source` returns, in Prometheus' format, to each scrape."""
        self._texts.append(source)

    @overload
    def counter(self, name: str, help: str, **options: Unpack[_Options]) -> Counter: ...
    @overload
    def counter(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        *,
        known: Sequence[str] = (),
        **options: Unpack[_Options],
    ) -> MetricFamily[Counter]: ...
    def counter(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        *,
        known: Sequence[str] = (),
        **options: Unpack[_Options],
    ) -> Any:
        """Declare a counter. `name` should end in `_total`, as Prometheus recommends. The series
        of the `known` values of its label begin at 0: Prometheus does not see a first event that
        begins a series."""
        metric = self.register(name, help, Counter, labels, "counter", **options)
        for value in known:
            metric.labels(value)
        return metric

    @overload
    def gauge(self, name: str, help: str, **options: Unpack[_Options]) -> Gauge: ...
    @overload
    def gauge(
        self, name: str, help: str, labels: Sequence[str], **options: Unpack[_Options]
    ) -> MetricFamily[Gauge]: ...
    def gauge(
        self, name: str, help: str, labels: Sequence[str] = (), **options: Unpack[_Options]
    ) -> Any:
        """Declare a gauge."""
        return self.register(name, help, Gauge, labels, "gauge", **options)

    @overload
    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram: ...
    @overload
    def histogram(
        self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str]
    ) -> MetricFamily[Histogram]: ...
    def histogram(
        self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Any:
        """Declare a histogram. `buckets` are ascending upper bounds without +Inf."""
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"{name}: bounds must ascend")
        return self.register(name, help, lambda: Histogram(buckets), labels, "histogram")

    def register(
        self,
        name: str,
        text: str,
        make: Callable[[], Any],
        labels: Sequence[str],
        kind: str,
        callback: ScrapeCallback | None = None,
        merge: MergeMode = "sum",
    ) -> Any:
        """Declare a metric that `make` returns, or a family of them. Raises `ValueError` for a name
        that has another kind or other labels."""
        names = tuple(labels)
        entry = self._metrics.get(name)
        if entry is not None:
            if (entry.kind, entry.labels) != (kind, names):
                raise ValueError(f"{name} is already a {entry.kind} with labels {entry.labels}")
            entry.callback = callback or entry.callback
            return entry.metric
        if not _METRIC_NAME.match(name):
            raise ValueError(f"{name!r} is not a valid metric name")
        metric = MetricFamily(names, make) if names else make()
        self._metrics[name] = _RegisteredMetric(name, text, metric, kind, names, callback, merge)
        return metric

    def set_model_callback(self, name: str, model: str, callback: ScrapeCallback | None) -> None:
        """Set the callback for the values of a metric whose first label is `model`, or None."""
        callbacks = self._metrics[name].callbacks_by_model
        callbacks.pop(model, None)
        if callback is not None:
            callbacks[model] = callback

    def render(self) -> str:
        """Return all metrics in Prometheus' text format 0.0.4."""
        for callback in self._before_scrape:
            _call_foreign(callback)
        lines: list[str] = []
        for entry in self._metrics.values():
            lines.append(f"# HELP {entry.name} {_escape_help(entry.help)}")
            lines.append(f"# TYPE {entry.name} {entry.kind}")
            if entry.merge != "sum":
                lines.append(f"# MERGE {entry.name} {entry.merge}")
            for values, child in _label_values(entry):
                lines += _sample_lines(entry, values, child)
        texts = (_call_foreign(source) for source in self._texts)
        lines += [text.rstrip("\n") for text in texts if text]
        return "\n".join(lines) + "\n"

    def exemplars(self) -> dict[str, str]:
        """Return the exemplars of all histograms in OpenMetrics' format, by series."""
        texts: dict[str, str] = {}
        for entry in self._metrics.values():
            if entry.kind == "histogram":
                for values, child in _label_values(entry):
                    texts |= _exemplar_texts(entry, values, child)
        return texts


def _call_foreign(function: Callable[[], T]) -> T | None:
    """Return the result of a program's function, or None after a failure, which is logged."""
    try:
        return function()
    except Exception:
        log.exception("a program's metrics function failed")
        return None


def format_number(value: float) -> str:
    """Format a value in Prometheus' text format."""
    if value == float("inf"):
        return "+Inf"
    if value == float("-inf"):
        return "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)


def _label_values(entry: _RegisteredMetric) -> list[tuple[tuple[str, ...], Metric | float]]:
    if entry.callback is not None:
        return _callback_values(entry.callback)
    if entry.callbacks_by_model:
        return [
            ((model, *values), value)
            for model, callback in entry.callbacks_by_model.items()
            for values, value in _callback_values(callback)
        ]
    if entry.labels:
        return list(entry.metric.children.items())
    return [((), entry.metric)]


def _callback_values(callback: ScrapeCallback) -> list[tuple[tuple[str, ...], Metric | float]]:
    values = callback()
    return list(values.items()) if isinstance(values, Mapping) else [((), values)]


def _sample_lines(
    entry: _RegisteredMetric, values: tuple[str, ...], child: Metric | float
) -> list[str]:
    pairs = _label_pairs(entry.labels, values)
    if not isinstance(child, Histogram):
        value = child if isinstance(child, int | float) else child.value
        return [f"{_series_name(entry.name, pairs)} {format_number(value)}"]
    lines = []
    total = 0
    for bound, count in zip([*child.bounds, float("inf")], child.counts, strict=True):
        total += count
        lines.append(f"{_bucket_name(entry.name, pairs, bound)} {total}")
    lines.append(f"{_series_name(f'{entry.name}_sum', pairs)} {format_number(child.sum)}")
    lines.append(f"{_series_name(f'{entry.name}_count', pairs)} {total}")
    return lines


def _exemplar_texts(
    entry: _RegisteredMetric, values: tuple[str, ...], histogram: Any
) -> dict[str, str]:
    pairs = _label_pairs(entry.labels, values)
    bounds = [*histogram.bounds, float("inf")]
    return {
        _bucket_name(entry.name, pairs, bounds[index]): (
            f" # {{{','.join(_label_pairs(tuple(labels), tuple(labels.values())))}}} "
            f"{value!r} {time_s:.3f}"
        )
        for index, (value, (labels, time_s)) in histogram.exemplars.items()
    }


def _label_pairs(names: tuple[str, ...], values: tuple[str, ...]) -> list[str]:
    return [f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)]


def _bucket_name(name: str, pairs: Sequence[str], bound: float) -> str:
    """Return the series of a bucket. Bounds are floats, as OpenMetrics and Prometheus 3 have it."""
    text = "+Inf" if bound == float("inf") else repr(float(bound))
    return _series_name(f"{name}_bucket", [*pairs, f'le="{text}"'])


def _series_name(name: str, pairs: Sequence[str]) -> str:
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def render_merged(texts: Sequence[str]) -> str:
    """Merge several results of `Registry.render` in order of first occurrence.

    Samples are summed. Gauges declared with `merge="max"` or "min" take that value.
    """
    heads: dict[str, dict[str, None]] = {}
    samples: dict[str, dict[str, float]] = {}
    combine: dict[str, Callable[[float, float], float]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            if line.startswith("# "):
                heads.setdefault(family, {})[line] = None
                if line.startswith("# MERGE "):
                    combine[family] = min if line.endswith(" min") else max
            elif line:
                name, _, number = line.rpartition(" ")
                merged, value = samples.setdefault(family, {}), float(number)
                if name in merged:
                    merge: Callable[[float, float], float] = combine.get(family, add)
                    value = merge(merged[name], value)
                merged[name] = value
    lines: list[str] = []
    for family, head in heads.items():
        lines += head
        lines += [
            f"{name} {format_number(value)}" for name, value in samples.get(family, {}).items()
        ]
    return "\n".join(lines) + "\n"
