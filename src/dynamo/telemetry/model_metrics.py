"""Metrics of one model: those of the process, with the label `model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamo.telemetry.metrics import (
    M,
    MergeMode,
    MetricFamily,
    Registry,
    ScrapeCallback,
)

MODEL_LABEL = "model"


class ModelRegistry(Registry):
    """Declares metrics in the registry of the process with `model` as their first label, which has
    this model's name. Their users see the other labels only. `close` removes the model's series."""

    def __init__(self, registry: Registry, model: str) -> None:
        super().__init__()
        self._process_registry = registry
        self._model = model
        self._names: dict[str, MetricFamily[Any]] = {}

    def before_scrape(self, callback: Callable[[], object]) -> None:
        """Call `callback` before each scrape of the process."""
        self._process_registry.before_scrape(callback)

    def add_text(self, source: Callable[[], str]) -> None:
        """Add the text that `source` returns to each scrape of the process."""
        self._process_registry.add_text(source)

    def close(self) -> None:
        """Remove all series of this model."""
        for name, family in self._names.items():
            self._process_registry.set_model_callback(name, self._model, None)
            for values in [values for values in family.children if values[0] == self._model]:
                family.remove(*values)

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
        """Declare a metric of the process, and return its part of this model."""
        registry = self._process_registry
        family = registry.register(name, text, make, (MODEL_LABEL, *labels), kind, None, merge)
        self._names[name] = family
        if callback is not None:
            registry.set_model_callback(name, self._model, callback)
        return _FamilyOfModel(family, self._model) if labels else family.labels(self._model)


class _FamilyOfModel(MetricFamily[M]):
    """A metric's children of one model."""

    def __init__(self, family: MetricFamily[M], model: str) -> None:
        super().__init__(family.label_names[1:], family.new_child)
        self._family = family
        self._model = model

    def labels(self, *values: str) -> M:
        """Return the model's child of these label values, created on first use."""
        return self._family.labels(self._model, *values)

    def remove(self, *values: str) -> None:
        """Remove a child if it exists."""
        self._family.remove(self._model, *values)
