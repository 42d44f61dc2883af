"""Managers that scale one adapter in turn, and the pods that leave when there are to be fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.operations.operator.kinds import GRAPH
from dynamo.operations.operator.status import time_value

CONFLICT_S = 300.0
COST = "controller.kubernetes.io/pod-deletion-cost"
FIRST, KEPT = "-1", "0"
"""Values of the annotation: of pods that leave first, and of pods that once were to."""


def replicas_manager(adapter: Mapping[str, Any]) -> tuple[str, float]:
    """Return who set the replicas of an adapter, and when; "" if nobody is known."""
    rows = [
        (time_value(row.get("time", "")), row.get("manager", ""))
        for row in adapter["metadata"].get("managedFields") or ()
        if "f:replicas" in ((row.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    when, manager = max(rows, default=(0.0, ""))
    return manager, when


class ScalingHistory:
    """The managers that changed the replicas of an adapter, in their order."""

    def __init__(self) -> None:
        self._replicas: int | None = None
        self._changes: list[tuple[float, str]] = []

    def note(self, adapter: Mapping[str, Any], now: float) -> None:
        """Note the replicas that an adapter has now."""
        replicas = adapter["spec"]["replicas"]
        if replicas == self._replicas:
            return
        if self._replicas is not None:
            manager, _ = replicas_manager(adapter)
            if not self._changes or self._changes[-1][1] != manager:
                self._changes.append((now, manager))
            else:
                self._changes[-1] = (now, manager)
            del self._changes[:-3]
        self._replicas = replicas

    def managers_in_turn(self, now: float) -> Sequence[str]:
        """Return the two managers that scale in turn: each has undone the other's change lately."""
        if len(self._changes) < 3 or now - self._changes[0][0] > CONFLICT_S:
            return ()
        first, second, third = (manager for _, manager in self._changes)
        return sorted((first, second)) if first == third else ()


def deletion_costs(
    pods: Sequence[Mapping[str, Any]], loads: Mapping[str, float], leaving: int
) -> Mapping[str, str]:
    """Return the annotations to write, by name of pod, so that the pods with the least load leave
    first. Pods whose load is unknown have none."""
    order = sorted(loads, key=lambda name: (loads[name], name))
    first = set(order[:leaving])
    result = {}
    for pod in pods:
        name = pod["metadata"]["name"]
        past = (pod["metadata"].get("annotations") or {}).get(COST)
        cost = FIRST if name in first else KEPT
        if past != cost and (name in first or past == FIRST):
            result[name] = cost
    return result


def replica_fields(graph: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the replicas of components, by their names, for an apply of these fields."""
    metadata = graph["metadata"]
    services = graph["spec"].get("services")
    spec: dict[str, Any] = {"components": [{"name": n, "replicas": c} for n, c in counts.items()]}
    if services is not None:
        spec = {"services": {name: {"replicas": count} for name, count in counts.items()}}
    return {
        "apiVersion": graph["apiVersion"],
        "kind": GRAPH,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "spec": spec,
    }
