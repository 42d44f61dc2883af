"""The gangs of a graph's spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.operations.operator.kinds import ComponentSpec, GraphSpec, TopologyConstraint
from dynamo.operations.operator.rules import NO_PODS
from dynamo.operations.placement.fit import Gang
from dynamo.operations.placement.gangs import ScaledPart, graph_gangs
from dynamo.operations.placement.quantity import pod_requests
from dynamo.operations.placement.topology import CLUSTER, level_noun


def gangs_of_graph(name: str, spec: GraphSpec, levels: Sequence[str]) -> Sequence[Gang]:
    """Return the gangs of a graph on nodes with these levels. Raises `ConfigError` for a
    constraint by a level that the nodes do not have."""
    parts = [
        _part(component, levels) for component in spec.components if component.type not in NO_PODS
    ]
    level = find_level(spec.topology_constraint, levels, "spec.topologyConstraint")
    return graph_gangs(name, parts, required=level)


def find_level(constraint: TopologyConstraint | None, levels: Sequence[str], path: str) -> str:
    """Return the level that `packDomain` names by its label or its noun, such as rack."""
    domain = constraint.pack_domain if constraint else ""
    for level in levels:
        if domain in {level, level_noun(level)}:
            return level
    if not domain:
        return CLUSTER
    known = ", ".join(level_noun(level) for level in levels if level)
    raise ConfigError(f"{path}.packDomain: no node has a level {domain!r}", hint=f"known: {known}")


def _part(component: ComponentSpec, levels: Sequence[str]) -> ScaledPart:
    pod: dict[str, Any] = component.pod_template.get("spec") or {}
    path = f"{component.name}.topologyConstraint"
    return ScaledPart(
        component.name,
        component.replicas,
        pod_requests(pod),
        component.min_available or 1,
        component.multinode.node_count if component.multinode else 1,
        find_level(component.topology_constraint, levels, path),
        pod.get("nodeSelector") or {},
    )
