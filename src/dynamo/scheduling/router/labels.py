"""Constraints: a request may ask for workers that bear certain labels."""

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


class NoAvailableWorker(NoWorkers):
    """No worker satisfies the constraints."""


def read_constraints(context: Context) -> Constraints:
    """What the request asks of its worker."""
    text = context.metadata.get(LABELS_KEY)
    return parse_labels(text) if text else NO_CONSTRAINTS


def excluded_workers(instances: Mapping[str, Instance], context: Context) -> frozenset[str]:
    """The ids of those that the request must not go to. Raises `NoAvailableWorker` where that is
    all of them."""
    wanted = read_constraints(context)
    if not wanted:
        return frozenset()
    out = frozenset(
        name
        for name, instance in instances.items()
        if not satisfies_constraints(instance.capabilities.get(LABELS_KEY) or {}, wanted)
    )
    if instances and len(out) == len(instances):
        raise NoAvailableWorker(
            f"no worker is labelled {context.metadata[LABELS_KEY]!r}",
            hint="start one with --worker-labels, or ask without x-dynamo-labels",
        )
    return out
