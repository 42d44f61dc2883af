"""The gangs of graphs: those of a spec, and those of pods that wait behind their gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.operator.kinds import ComponentSpec, GraphSpec, TopologyConstraint
from dynamo.operations.operator.names import COMPONENT_LABEL, GANG_GATE, GENERATION_LABEL, bounded
from dynamo.operations.operator.rules import NO_PODS
from dynamo.operations.operator.status import is_ready, pods_of, time_value
from dynamo.operations.operator.view import GraphView
from dynamo.operations.placement.explain import explain_refusal
from dynamo.operations.placement.fit import Gang, PlacedGang, PodGroup, place
from dynamo.operations.placement.nodes import ENDED
from dynamo.operations.placement.quantity import pod_requests
from dynamo.operations.placement.queue import BIND_S, GangQueue
from dynamo.operations.placement.topology import CLUSTER, Topology, level_noun


class ScaledPart(msgspec.Struct, frozen=True):
    """A component of a graph: its replicas, of `nodes` pods each. A replica of several pods stays
    within a domain of `level`."""

    name: str
    replicas: int
    request: Mapping[str, int]
    min_available: int = 1
    nodes: int = 1
    level: str = CLUSTER
    selector: Mapping[str, str] = {}


def graph_gangs(graph: str, parts: Sequence[ScaledPart], required: str = CLUSTER) -> Sequence[Gang]:
    """Return the first gang, with the fewest replicas of each component that serve, and one for
    each further replica. These wait until the first one stands, so that prefill and decode are
    scaled apart, and a graph that cannot start holds no GPUs."""
    first, further = [], []
    for part in parts:
        base = min(part.replicas, max(1, part.min_available))
        if part.nodes > 1 and part.level:
            first += [_group(part, f"{part.name}-{number}", 1) for number in range(base)]
        elif base:
            first.append(_group(part, part.name, base))
        for number in range(base, part.replicas):
            group = _group(part, part.name, 1)
            name = f"{graph}-{part.name}-{number}"
            further.append(Gang(name, [group], required=required, after=graph))
    return [Gang(graph, first, required=required), *further] if first else []


def _group(part: ScaledPart, name: str, replicas: int) -> PodGroup:
    return PodGroup(name, replicas * part.nodes, part.request, part.level, part.selector)


OPENED = f"{GANG_GATE}-opened"
"""The annotation of a pod whose gate was opened: when."""
GANG = f"{GANG_GATE}-name"
TERMINATION_S = 4 * 3600.0
"""A gang that once had its fewest pods, and lacks some for longer, is made again as a whole."""
Object = Mapping[str, Any]


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


def wants_gangs(spec: GraphSpec, annotations: Mapping[str, str]) -> bool:
    """Whether the pods of a graph start together: it names a domain, or says so."""
    constraints = [part.topology_constraint for part in spec.components]
    constraints.append(spec.topology_constraint)
    named = any(constraint is not None and constraint.pack_domain for constraint in constraints)
    return named or annotations.get(GANG_GATE, "").lower() == "true"


class GatedGraph(msgspec.Struct):
    """A graph with gangs: its manifest, and its pods."""

    key: tuple[str, str]
    spec: GraphSpec
    pods: Sequence[Object]


class OpenGate(msgspec.Struct, frozen=True):
    """A pod that may be scheduled now, on the nodes with these labels."""

    pod: Object
    gang: str
    selector: Mapping[str, str]


class GangPlan(msgspec.Struct):
    """The pods whose gates are to be opened, those to delete since their gang was not bound in
    time, and by graph why others wait."""

    opened: list[OpenGate] = []
    expired: list[Object] = []
    waiting: dict[tuple[str, str], str] = {}


def plan_gangs(graphs: Sequence[GatedGraph], topology: Topology, now: float) -> GangPlan:
    """Return what is to be done about gated pods. `topology` has what running pods leave free."""
    plan, queue = GangPlan(), GangQueue(topology)
    members: dict[str, tuple[tuple[str, str], Sequence[Object]]] = {}
    for graph in graphs:
        _hold_opened(graph, topology, plan, now)
    for graph in graphs:
        try:
            for gang, pods in _waiting_gangs(graph, topology):
                queue.add(gang, min(_created(pod) for pod in pods))
                members[gang.name] = (graph.key, pods)
        except ConfigError as error:
            plan.waiting[graph.key] = error.message
    for placed in queue.step(now):
        _, pods = members[placed.gang.name]
        selector = _domain_labels(topology, placed)
        plan.opened += [OpenGate(pod, placed.gang.name, selector) for pod in pods]
    for entry in queue.waiting:
        key, _ = members[entry.gang.name]
        plan.waiting.setdefault(key, "\n".join(explain_refusal(topology, entry.gang)))
    return plan


def lacking_components(view: GraphView) -> list[str]:
    """Return the components of the present generation with fewer ready pods than their gang needs,
    by name."""
    ready = [pod for pod in view.pods_of(view.generation) if is_ready(pod) and is_active(pod)]
    return [
        part.name
        for role, (_, part) in view.components.items()
        if len(pods_of(ready, role)) < min(view.targets[role], part.min_available or 1)
    ]


def is_gated(pod: Object) -> bool:
    """Whether a pod waits for its gang."""
    return any(gate["name"] == GANG_GATE for gate in pod["spec"].get("schedulingGates") or ())


def _hold_opened(graph: GatedGraph, topology: Topology, plan: GangPlan, now: float) -> None:
    """Take the room of pods whose gates are open, and give up gangs that were not bound in time."""
    late = set()
    for pod in graph.pods:
        annotations = pod["metadata"].get("annotations") or {}
        if pod["spec"].get("nodeName") or OPENED not in annotations:
            continue
        if now - time_value(annotations[OPENED]) > BIND_S:
            late.add(annotations[GANG])
        else:
            group = PodGroup(
                "", 1, pod_requests(pod["spec"]), selector=pod["spec"].get("nodeSelector") or {}
            )
            place(topology, Gang("", [group]))
    plan.expired += [
        pod
        for pod in graph.pods
        if (pod["metadata"].get("annotations") or {}).get(GANG) in late and is_active(pod)
    ]


def _waiting_gangs(graph: GatedGraph, topology: Topology) -> list[tuple[Gang, Sequence[Object]]]:
    """Return the gangs of gated pods. The first gang of a generation has the fewest pods of each
    component that serve. Each pod beyond is a gang of its own, once the first one stands."""
    active = [pod for pod in graph.pods if is_active(pod)]
    return [
        gang
        for generation in sorted({_label(pod, GENERATION_LABEL) for pod in active})
        for gang in _gangs_of_generation(
            graph, topology, generation,
            [pod for pod in active if _label(pod, GENERATION_LABEL) == generation],
        )
    ]  # fmt: skip


def _gangs_of_generation(
    graph: GatedGraph, topology: Topology, generation: str, own: Sequence[Object]
) -> list[tuple[Gang, Sequence[Object]]]:
    spec, levels = graph.spec, topology.levels
    name = f"{graph.key[0]}/{graph.key[1]}/{generation}"
    required = find_level(spec.topology_constraint, levels, "spec.topologyConstraint")
    near = _nodes_labels([pod for pod in own if not is_gated(pod)], topology, required)
    first: list[PodGroup] = []
    members: list[Object] = []
    rest: list[tuple[Gang, Sequence[Object]]] = []
    missing = False
    for part in spec.components:
        role = bounded(part.name.lower())
        pods = [pod for pod in own if _label(pod, COMPONENT_LABEL) == role]
        missing = missing or (not pods and part.replicas > 0 and part.type not in NO_PODS)
        level = find_level(part.topology_constraint, levels, f"{part.name}.topologyConstraint")
        gated = sorted(filter(is_gated, pods), key=lambda pod: str(pod["metadata"]["name"]))
        if not gated:
            continue
        selector = {**(gated[0]["spec"].get("nodeSelector") or {}), **near}
        request = pod_requests(gated[0]["spec"])
        base = min(len(pods), part.min_available or 1) - (len(pods) - len(gated))
        if base > 0:
            first.append(PodGroup(role, base, request, level, selector))
            members += gated[:base]
        for pod in gated[max(0, base) :]:
            group = PodGroup(role, 1, request, level, selector)
            gang = Gang(f"{name}/{pod['metadata']['name']}", [group], required=required)
            rest.append((gang, [pod]))
    if first:
        return [] if missing else [(Gang(name, first, required=required), members)]
    return rest


def _nodes_labels(pods: Sequence[Object], topology: Topology, level: str) -> Mapping[str, str]:
    """Return the labels of the domain of a level in which the first bound pod is."""
    names = [pod["spec"].get("nodeName") for pod in pods]
    node = next((topology.nodes[name] for name in names if name in topology.nodes), None)
    if node is None or level == CLUSTER:
        return {}
    broad = topology.levels[1 : topology.levels.index(level) + 1]
    return {label: node.labels[label] for label in broad if label in node.labels}


def _domain_labels(topology: Topology, placed: PlacedGang) -> Mapping[str, str]:
    """Return the labels that the nodes of a gang's domain share, and no others."""
    pod = {"spec": {"nodeName": placed.pods[0].node}}
    return _nodes_labels([pod], topology, placed.level)


def is_active(pod: Object) -> bool:
    """Whether a pod has neither ended nor been deleted."""
    ended = (pod.get("status") or {}).get("phase") in ENDED
    return not ended and "deletionTimestamp" not in pod["metadata"]


def _label(pod: Object, name: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def _created(pod: Object) -> float:
    return time_value(pod["metadata"].get("creationTimestamp", ""))
