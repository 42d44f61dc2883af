"""`endpoint.metrics` of NVIDIA Dynamo's bindings: metrics of the program on its status port.

A name gets the prefix `dynamo_component_` and the labels of its endpoint. Methods may be called
from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dynamo.runtime.compatibility.errors import refuse_name
from dynamo.telemetry import Registry
from dynamo.telemetry.metrics import MetricFamily

PREFIX = "dynamo_component_"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The buckets of a histogram without its own."""

_CREATE = re.compile(r"create_(int)?(counter|gauge|histogram)(vec)?")

ConstantLabels = Sequence[tuple[str, str]] | None


class MetricName(str):
    """A name that programs read as an attribute or by a call, according to their version."""

    __slots__ = ()

    def __call__(self) -> str:
        return str(self)


class MetricLabels(dict[str, str]):
    """Labels that programs read as an attribute or by a call."""

    def __call__(self) -> dict[str, str]:
        return dict(self)


class ProgramMetric:
    """A metric of a program. Methods of a metric with labels also take these as a mapping, before
    or after the value."""

    def __init__(
        self, name: str, family: MetricFamily[Any], constants: Mapping[str, str], whole: bool
    ) -> None:
        self.name = MetricName(name)
        self.const_labels = MetricLabels(constants)
        self._family = family
        self._whole = whole

    def show(self) -> None:
        """Show a metric without labels before it has a value."""
        self._child(None)

    def variable_labels(self) -> list[str]:
        """Return the names of the labels that each call gives."""
        return [name for name in self._family.label_names if name not in self.const_labels]

    def get(self, labels: Mapping[str, str] | None = None) -> float:
        """Return the value."""
        value = self._child(labels).value
        return int(value) if self._whole else float(value)

    def inc(self, labels: Mapping[str, str] | None = None) -> None:
        """Add 1."""
        self._child(labels).inc(1)

    def dec(self, labels: Mapping[str, str] | None = None) -> None:
        """Subtract 1."""
        self._child(labels).dec(1)

    def inc_by(self, *value_and_labels: Any) -> None:
        """Add a value."""
        value, labels = _split(value_and_labels)
        self._child(labels).inc(value)

    add = inc_by

    def dec_by(self, *value_and_labels: Any) -> None:
        """Subtract a value."""
        value, labels = _split(value_and_labels)
        self._child(labels).dec(value)

    sub = dec_by

    def set(self, *value_and_labels: Any) -> None:
        """Replace the value."""
        value, labels = _split(value_and_labels)
        self._child(labels).set(value)

    def observe(self, *value_and_labels: Any) -> None:
        """Count a value of a histogram."""
        value, labels = _split(value_and_labels)
        self._child(labels).observe(value)

    def _child(self, labels: Mapping[str, str] | None) -> Any:
        values = {**self.const_labels, **(labels or {})}
        if values.keys() != set(self._family.label_names):
            wanted = ", ".join(self.variable_labels()) or "none"
            raise ValueError(f"{self.name} takes values of the labels: {wanted}; got {labels}")
        return self._family.labels(*(str(values[name]) for name in self._family.label_names))


def _split(value_and_labels: Sequence[Any]) -> tuple[float, Mapping[str, str] | None]:
    """Return a value and its labels, which older and newer methods take in different orders."""
    labels = next((part for part in value_and_labels if isinstance(part, Mapping)), None)
    value, *_ = (part for part in value_and_labels if not isinstance(part, Mapping))
    return value, labels


class EndpointMetrics:
    """Creates the metrics of an endpoint, and adds text of other sources to /metrics."""

    def __init__(self, registry: Registry, namespace: str, component: str, endpoint: str) -> None:
        self._registry = registry
        self._labels = {
            "dynamo_namespace": namespace,
            "dynamo_component": component,
            "dynamo_endpoint": endpoint,
        }

    def register_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` before each scrape."""
        self._registry.before_scrape(callback)

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Add the text that `callback` returns to each scrape."""
        self._registry.add_text(callback)

    def __getattr__(self, name: str) -> Callable[..., ProgramMetric]:
        """Return `create_counter`, `create_intgaugevec` and their kin."""
        match = _CREATE.fullmatch(name)
        if match is None:
            refuse_name("endpoint.metrics", name)
        whole, kind, has_labels = match.groups()
        create = partial(self._create, kind, bool(whole))
        if has_labels:
            return create
        return lambda name, text, *rest, **named: create(name, text, (), *rest, **named)

    def _create(
        self,
        kind: str,
        whole: bool,
        name: str,
        description: str,
        label_names: Sequence[str],
        const_labels: ConstantLabels = None,
        buckets: Sequence[float] | None = None,
    ) -> ProgramMetric:
        full_name, constants = f"{PREFIX}{name}", {**self._labels, **dict(const_labels or ())}
        labels = (*label_names, *constants)
        registry = self._registry
        family: MetricFamily[Any]
        if kind == "histogram":
            family = registry.histogram(full_name, description, buckets or BUCKETS, labels)
        else:
            declare = registry.gauge if kind == "gauge" else registry.counter
            family = declare(full_name, description, labels)
        metric = ProgramMetric(full_name, family, constants, whole)
        if not label_names:
            metric.show()
        return metric
