"""Names, labels and annotations of the objects of a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.operations.operator.kinds import BETA, GRAPH, GROUP

OPERATOR = "dynamo-operator"
"""The field manager of what the operator applies."""
SCALING = "dynamo-scaling"
"""The field manager of the replicas that adapters order."""
MAX_NAME = 63
HASH_DIGITS = 8
GRAPH_LABEL = f"{GROUP}/dynamo-graph-deployment-name"
COMPONENT_LABEL = f"{GROUP}/dynamo-component"
TYPE_LABEL = f"{GROUP}/dynamo-component-type"
NAMESPACE_LABEL = f"{GROUP}/dynamo-namespace"
GENERATION_LABEL = f"{GROUP}/dynamo-worker-hash"
BACKEND_LABEL = f"{GROUP}/dynamo-discovery-backend"
DISCOVERY_LABEL = f"{GROUP}/dynamo-discovery-enabled"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
APPLIED = f"{GROUP}/dynamo-applied"
"""The annotation with the hash of what the operator applied last."""
DEFAULTS = f"{GROUP}/dynamo-defaults"
"""The annotation with the defaults that a workload was made with."""
RESTART = f"{GROUP}/dynamo-restart"
GROVE_SWITCH = f"{GROUP}/enable-grove"
GANG_GATE = f"{GROUP}/dynamo-gang"


def digest(value: Any) -> str:
    """Return 8 hexadecimal digits that stand for a value."""
    data = msgspec.json.encode(value, order="sorted")
    return hashlib.sha256(data).hexdigest()[:HASH_DIGITS]


def bounded(name: str, length: int = MAX_NAME) -> str:
    """Return a name of at most so many characters: a longer one is cut, and ends in its hash."""
    if len(name) <= length:
        return name
    return f"{name[: length - HASH_DIGITS - 1].rstrip('-.')}-{digest(name)}"


def object_name(graph: str, *parts: str, length: int = MAX_NAME) -> str:
    """Return the name of an object: the graph's, and parts in lower case."""
    return bounded("-".join(part for part in (graph, *parts) if part).lower(), length)


def dynamo_namespace(namespace: str, graph: str, generation: str) -> str:
    """Return the namespace of a generation's processes, in which no other generation's are."""
    return object_name(namespace, graph, generation)


class GraphKey(msgspec.Struct, frozen=True):
    """The identity of a graph: where its objects are, and who owns them."""

    namespace: str
    name: str
    uid: str = ""

    @classmethod
    def of(cls, graph: Mapping[str, Any]) -> GraphKey:
        """Return the key of a graph's object."""
        metadata = graph["metadata"]
        return cls(metadata.get("namespace", "default"), metadata["name"], metadata.get("uid", ""))

    def labels(self, **more: str) -> dict[str, str]:
        """Return the labels of every object of the graph."""
        return {
            MANAGED_BY_LABEL: OPERATOR,
            GRAPH_LABEL: bounded(self.name),
            BACKEND_LABEL: "kubernetes",
            **more,
        }

    def metadata(self, name: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the metadata of an object that goes with the graph."""
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self.namespace,
            "labels": {**self.labels(), **(labels or {})},
        }
        if self.uid:
            owner = {
                "apiVersion": f"{GROUP}/{BETA}",
                "kind": GRAPH,
                "name": self.name,
                "uid": self.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
            metadata["ownerReferences"] = [owner]
        return metadata

    def component_labels(self, component: str, kind: str, generation: str) -> dict[str, str]:
        """Return the labels of a component's pods."""
        return {
            COMPONENT_LABEL: bounded(component.lower()),
            TYPE_LABEL: kind,
            NAMESPACE_LABEL: dynamo_namespace(self.namespace, self.name, generation),
            GENERATION_LABEL: generation,
        }


def selector(graph: str, component: str) -> dict[str, str]:
    """Return the labels that select the pods of a component, of all generations."""
    return {GRAPH_LABEL: bounded(graph), COMPONENT_LABEL: bounded(component.lower())}
