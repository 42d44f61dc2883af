"""The workload of a component in a generation: a Deployment, or for replicas of several nodes a
PodCliqueSet of Grove or a LeaderWorkerSet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.operations.operator.kinds import WORKER_TYPES, ComponentSpec, GraphSpec
from dynamo.operations.operator.names import (
    COMPONENT_LABEL,
    DEFAULTS,
    GENERATION_LABEL,
    GROVE_SWITCH,
    RESTART,
    TYPE_LABEL,
    GraphKey,
    digest,
    object_name,
    selector,
)

Object = dict[str, Any]
DEPLOYMENT, CLIQUE_SET, LEADER_SET = "Deployment", "PodCliqueSet", "LeaderWorkerSet"
SCALING_GROUP = "PodCliqueScalingGroup"
WORKLOADS = (DEPLOYMENT, CLIQUE_SET, LEADER_SET)
GROVE, LEADER_WORKER = "grove.io", "leaderworkerset.x-k8s.io"
API_VERSIONS = {
    DEPLOYMENT: "apps/v1",
    CLIQUE_SET: f"{GROVE}/v1alpha1",
    LEADER_SET: f"{LEADER_WORKER}/v1",
}
CLIQUE_SET_NAME = 45 - len("replica" + "leader")
"""Grove bounds the names of a set, a scaling group and a clique together."""


class Workload(msgspec.Struct, frozen=True):
    """A workload as it is: what was ordered, and how far it is."""

    kind: str
    name: str
    component: str
    type: str
    generation: str
    created: str
    ordered: int
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    available: int = 0
    is_current: bool = False
    """Whether the counts are those of the present spec."""
    restart: str = ""
    defaults: str = ""
    scaled: tuple[str, str] = ("", "")
    """Kind and name of the object that has the replicas."""

    @property
    def key(self) -> tuple[str, str]:
        """Return kind and name."""
        return (self.kind, self.name)

    @property
    def is_gone(self) -> bool:
        """Whether it has no replicas, nor orders any."""
        return not self.ordered and not self.replicas and self.is_current


def generation_of(spec: GraphSpec) -> str:
    """Return the name of the generation that workers of a spec form: a hash of what the user wrote
    about their pods."""
    parts = [
        [
            component.name.lower(),
            component.type,
            component.pod_template.get("spec") or {},
            component.multinode,
            component.shared_memory_size,
            component.compilation_cache,
        ]
        for component in sorted(spec.components, key=lambda component: component.name.lower())
        if component.type in WORKER_TYPES or component.type is None
    ]
    return digest([parts, spec.env, spec.priority_class_name, spec.backend_framework])


def workload_kind(
    component: ComponentSpec, annotations: Mapping[str, str], groups: Iterable[str]
) -> str:
    """Return the kind that a component becomes, "" if the cluster serves none for it."""
    if component.multinode is None:
        return DEPLOYMENT
    if GROVE in groups and annotations.get(GROVE_SWITCH, "").lower() != "false":
        return CLIQUE_SET
    return LEADER_SET if LEADER_WORKER in groups else ""


def read_workload(item: Object, groups: Mapping[tuple[str, str], Object]) -> Workload:
    """Return what an object orders and has. `groups` are the scaling groups of Grove."""
    kind, metadata, spec = item["kind"], item["metadata"], item.get("spec") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    name = metadata["name"]
    scaled, template = (kind, name), spec.get("template") or {}
    if kind == CLIQUE_SET:
        parts = template.get("podCliqueScalingGroups") or [{}]
        scaled = (SCALING_GROUP, f"{name}-0-{parts[0].get('name', '')}")
        group = groups.get(scaled)
        spec = group["spec"] if group else parts[0]
        item, metadata = group or {"status": {}}, (group or item)["metadata"]
        template = {}
    elif kind == LEADER_SET:
        template = (spec.get("leaderWorkerTemplate") or {}).get("workerTemplate") or {}
    status = item.get("status") or {}
    restart = ((template.get("metadata") or {}).get("annotations") or {}).get(RESTART, "")
    replicas = status.get("replicas", 0)
    ready = status.get("readyReplicas", status.get("availableReplicas", 0))
    return Workload(
        kind,
        name,
        labels.get(COMPONENT_LABEL, ""),
        labels.get(TYPE_LABEL, ""),
        labels.get(GENERATION_LABEL, ""),
        metadata.get("creationTimestamp", ""),
        spec.get("replicas", 1),
        replicas,
        status.get("updatedReplicas", 0),
        min(ready, replicas),
        status.get("availableReplicas", ready),
        # LeaderWorkerSets count without naming the spec that they observed
        kind == LEADER_SET or status.get("observedGeneration", 0) >= metadata.get("generation", 1),
        restart,
        annotations.get(DEFAULTS, ""),
        scaled,
    )


class WorkloadMaker:
    """Makes the workloads of a generation."""

    def __init__(self, graph: GraphKey, generation: str) -> None:
        self._graph = graph
        self._generation = generation

    def name(self, component: ComponentSpec, kind: str) -> str:
        """Return the name of a component's workload."""
        length = CLIQUE_SET_NAME if kind == CLIQUE_SET else 63
        return object_name(self._graph.name, component.name, self._generation, length=length)

    def make(
        self, component: ComponentSpec, kind: str, template: Object, replicas: int, defaults: str
    ) -> Object:
        """Return the workload of a component."""
        labels = self._graph.component_labels(
            component.name, component.type or "worker", self._generation
        )
        metadata = self._graph.metadata(self.name(component, kind), labels)
        metadata["annotations"] = {DEFAULTS: defaults}
        specs = {
            DEPLOYMENT: self._deployment,
            CLIQUE_SET: self._clique_set,
            LEADER_SET: self._leader_set,
        }
        return {
            "apiVersion": API_VERSIONS[kind],
            "kind": kind,
            "metadata": metadata,
            "spec": specs[kind](component, template, replicas),
        }

    def _deployment(self, component: ComponentSpec, template: Object, replicas: int) -> Object:
        labels = selector(self._graph.name, component.name)
        return {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": {**labels, GENERATION_LABEL: self._generation}},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0},
            },
            "template": template,
        }

    def _leader_set(self, component: ComponentSpec, template: Object, replicas: int) -> Object:
        return {
            "replicas": replicas,
            "leaderWorkerTemplate": {
                "size": component.multinode.node_count if component.multinode else 1,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,
            },
        }

    def _clique_set(self, component: ComponentSpec, template: Object, replicas: int) -> Object:
        """Return a set with one scaling group, a replica of which has a leader and workers."""
        nodes = component.multinode.node_count if component.multinode else 1
        cliques = [
            {
                "name": part,
                "labels": template["metadata"]["labels"],
                "annotations": template["metadata"].get("annotations", {}),
                "spec": {"roleName": part, "replicas": count, "minAvailable": count,
                         "podSpec": template["spec"]},
            }
            for part, count in (("leader", 1), ("worker", nodes - 1))
        ]  # fmt: skip
        group = {
            "name": "replica",
            "cliqueNames": ["leader", "worker"],
            "replicas": replicas,
            "minAvailable": min(replicas, component.min_available or 1) or 1,
        }
        return {
            "replicas": 1,
            "template": {"cliques": cliques, "podCliqueScalingGroups": [group]},
        }


def sort_generations(workloads: Sequence[Workload]) -> Sequence[str]:
    """Return the generations of workloads, the oldest first."""
    created: dict[str, str] = {}
    for workload in workloads:
        at = created.get(workload.generation)
        created[workload.generation] = min(at, workload.created) if at else workload.created
    return sorted(created, key=lambda name: (created[name], name))
