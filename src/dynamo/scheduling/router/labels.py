"""Label constraints: a request may require workers with certain labels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.labels import LABELS_KEY, parse_labels, satisfies_constraints
from dynamo.runtime.calls.instances import Instance

Constraints = Mapping[str, str]
"""Label -> the value that a worker must have."""

NO_CONSTRAINTS: Constraints = MappingProxyType({})

MAX_REMEMBERED_LABELS = 64
"""Different labels whose excluded workers are remembered."""


class NoAvailableWorker(NoWorkers):
    """No worker satisfies the constraints."""


def read_constraints(context: Context) -> Constraints:
    """Return the labels that the request requires of its worker."""
    text = context.metadata.get(LABELS_KEY)
    return parse_labels(text) if text else NO_CONSTRAINTS


def find_excluded_workers(instances: Mapping[str, Instance], labels: str) -> frozenset[str]:
    """Return the ids of instances that lack one of the labels, written as `zone=a,gpu=h100`."""
    constraints = parse_labels(labels) if labels else NO_CONSTRAINTS
    if not constraints:
        return frozenset()
    return frozenset(
        name
        for name, instance in instances.items()
        if not satisfies_constraints(instance.capabilities.get(LABELS_KEY) or {}, constraints)
    )


def excluded_workers(instances: Mapping[str, Instance], context: Context) -> frozenset[str]:
    """Return the ids of instances that lack a required label. Raises `NoAvailableWorker` if every
    instance does."""
    labels = context.metadata.get(LABELS_KEY, "")
    excluded = find_excluded_workers(instances, labels)
    if instances and len(excluded) == len(instances):
        raise NoAvailableWorker(
            f"no worker is labelled {labels!r}",
            hint="start a worker with --worker-labels, or send no x-dynamo-labels",
        )
    return excluded


class ExcludedWorkersCache:
    """Remembers the result of `excluded_workers` for each labels text while `instances` is the same
    object, since the search looks at every instance."""

    def __init__(self) -> None:
        self._instances: Mapping[str, Instance] = {}
        self._excluded: dict[str, frozenset[str]] = {}

    def get(self, instances: Mapping[str, Instance], context: Context) -> frozenset[str]:
        """Return the result of `excluded_workers`. Raises `NoAvailableWorker` like it."""
        labels = context.metadata.get(LABELS_KEY, "")
        if instances is not self._instances or len(self._excluded) >= MAX_REMEMBERED_LABELS:
            self._instances = instances
            self._excluded.clear()
        excluded = self._excluded.get(labels)
        if excluded is None:
            excluded = self._excluded[labels] = excluded_workers(instances, context)
        return excluded
