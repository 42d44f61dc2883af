"""Constraints: a request may ask for workers that bear certain labels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.labels import LABELS, meets, read_labels
from dynamo.runtime.instances import Instance

Constraints = Mapping[str, str]
"""Label -> the value that a worker must have."""

UNCONSTRAINED: Constraints = MappingProxyType({})


class NoAvailableWorker(NoWorkers):
    """No worker satisfies the constraints."""


def constraints_of(context: Context) -> Constraints:
    """What the request asks of its worker."""
    text = context.metadata.get(LABELS)
    return read_labels(text) if text else UNCONSTRAINED


def barred(instances: Mapping[str, Instance], context: Context) -> frozenset[str]:
    """The ids of those that the request must not go to. Raises `NoAvailableWorker` where that is
    all of them."""
    wanted = constraints_of(context)
    if not wanted:
        return frozenset()
    out = frozenset(
        name
        for name, instance in instances.items()
        if not meets(instance.capabilities.get(LABELS) or {}, wanted)
    )
    if instances and len(out) == len(instances):
        raise NoAvailableWorker(
            f"no worker is labelled {context.metadata[LABELS]!r}",
            hint="start one with --worker-labels, or ask without x-dynamo-labels",
        )
    return out
