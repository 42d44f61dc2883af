"""A graph as a manifest and as what is there: its components, targets and workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.operations.operator.kinds import ADAPTER, ComponentSpec, GraphSpec, GraphStatus
from dynamo.operations.operator.names import GENERATION_LABEL, GraphKey, bounded, object_name
from dynamo.operations.operator.rules import NO_PODS, GraphCheck
from dynamo.operations.operator.status import is_settled, read_status
from dynamo.operations.operator.upgrade import Problem
from dynamo.operations.operator.workloads import (
    SCALING_GROUP,
    WORKLOADS,
    Workload,
    generation_of,
    read_workload,
)

Object = dict[str, Any]
Key = tuple[str, str]
"""Kind and name."""


class Observed(msgspec.Struct):
    """The objects and pods of a graph. `groups` are the API groups that the cluster serves.
    `missing` and `refused` are what the API server says of the present manifest. `secret` is a new
    secret of the planes, None if there is one."""

    now: float
    objects: Mapping[Key, Object] = {}
    pods: Sequence[Object] = ()
    groups: frozenset[str] = frozenset()
    missing: Sequence[Problem] = ()
    refused: Sequence[Problem] = ()
    secret: bytes | None = None
    scaling_conflicts: Mapping[str, Sequence[str]] = {}
    has_gates: bool = False
    """Whether the cluster has scheduling gates (1.30)."""
    waits: str = ""
    """Why gated pods wait."""

    def workloads(self) -> list[Workload]:
        """Return the workloads of all generations."""
        groups = {key: item for key, item in self.objects.items() if key[0] == SCALING_GROUP}
        return [
            read_workload(item, groups) for key, item in self.objects.items() if key[0] in WORKLOADS
        ]


class Desired(msgspec.Struct):
    """The objects and the status that a graph is to have. Writes are done in this order: the status
    if `status_first`, then `scales` (objects whose replicas change alone), `objects`, `deletions`,
    and the status.

    `replicas` are the numbers of all adapters, if the manifest has others.
    """

    status: GraphStatus
    check: GraphCheck
    objects: list[Object] = []
    scales: list[tuple[Key, int]] = []
    deletions: dict[Key, Object] = {}
    replicas: dict[str, int] = {}
    status_first: bool = False
    templates: dict[Key, tuple[int, Object]] = {}
    """By workload: the number of its component, and its template."""
    recheck_s: float = 0.0
    """The graph is to be looked at again after so long, without any change; 0: need not be."""


class GraphView:
    """A graph whose manifest is valid. A role is the label of a component."""

    def __init__(self, graph: Object, spec: GraphSpec, observed: Observed) -> None:
        self.key = GraphKey.of(graph)
        self.spec = spec
        self.observed = observed
        self.before: GraphStatus = read_status(graph)
        self.annotations: Mapping[str, str] = graph["metadata"].get("annotations") or {}
        self.components: dict[str, tuple[int, ComponentSpec]] = {
            bounded(component.name.lower()): (number, component)
            for number, component in enumerate(spec.components)
            if component.type not in NO_PODS
        }
        self.generation = generation_of(spec)
        self.targets = {role: self._target(part) for role, (_, part) in self.components.items()}
        self.workloads = observed.workloads()
        self.current = {
            workload.component: workload
            for workload in self.workloads
            if workload.generation == self.generation and workload.component in self.components
        }
        """The workloads of the present spec, by role."""
        self.others = [
            workload
            for workload in self.workloads
            if self.current.get(workload.component) is not workload
        ]

    def _target(self, component: ComponentSpec) -> int:
        item = self.observed.objects.get((ADAPTER, self.adapter_name(component)))
        if item is None or not has_adapter(component):
            return component.replicas
        return int(item["spec"]["replicas"])

    def adapter_name(self, component: ComponentSpec) -> str:
        """Return the name of a component's adapter."""
        return object_name(self.key.name, component.name)

    def name(self, role: str) -> str:
        """Return the name of a component."""
        return self.components[role][1].name

    def is_settled(self, role: str) -> bool:
        """Whether a component has all replicas that are wanted, ready and of the present spec."""
        return is_settled(self.current.get(role), self.targets[role])

    def pods_of(self, generation: str) -> list[Object]:
        """Return the pods of a generation, those that end included."""
        return [
            pod
            for pod in self.observed.pods
            if (pod["metadata"].get("labels") or {}).get(GENERATION_LABEL) == generation
        ]


def has_adapter(component: ComponentSpec) -> bool:
    """Whether an adapter has the replicas of a component."""
    return component.scaling_adapter is not None and component.scaling_adapter.enabled
