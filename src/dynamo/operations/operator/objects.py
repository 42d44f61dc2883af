"""The objects of a graph beside its workloads: accounts, roles, services, limits of disruption."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo.operations.operator.kinds import (
    ADAPTER,
    BETA,
    GROUP,
    METADATA,
    ComponentSpec,
    GraphSpec,
)
from dynamo.operations.operator.names import (
    COMPONENT_LABEL,
    DISCOVERY_LABEL,
    GRAPH_LABEL,
    TYPE_LABEL,
    GraphKey,
    bounded,
    object_name,
    selector,
)
from dynamo.operations.operator.pods import HTTP_PORT, STATUS_PORT, http_port

Object = dict[str, Any]
RBAC = "rbac.authorization.k8s.io"
DISCOVERY_RULES = (
    {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    },
    {
        "apiGroups": [GROUP],
        "resources": [f"{METADATA.lower()}s"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
)
PLANNER_RULES = (
    {
        "apiGroups": [GROUP],
        "resources": [f"{ADAPTER.lower()}s"],
        "verbs": ["get", "list", "watch"],
    },
    {"apiGroups": [GROUP], "resources": [f"{ADAPTER.lower()}s/scale"], "verbs": ["get", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
)


def plane_secret(graph: GraphKey, secret: bytes) -> Object:
    """Return the Secret that all processes of a graph share."""
    data = {"secret": base64.b64encode(secret).decode()}
    metadata = graph.metadata(object_name(graph.name, "planes"))
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data,
    }  # fmt: skip


def graph_objects(graph: GraphKey, spec: GraphSpec) -> Iterator[Object]:
    """Yield what a graph has once, whatever its components are."""
    accounts = {
        account
        for component in spec.components
        if (account := (component.pod_template.get("spec") or {}).get("serviceAccountName"))
    }
    name = object_name(graph.name, "k8s-service-discovery")
    planner = object_name(graph.name, "planner")
    has_planner = any(component.type == "planner" for component in spec.components)
    subjects = [name, *([planner] if has_planner else []), *sorted(accounts)]
    yield from _account(graph, name, DISCOVERY_RULES, subjects)
    if has_planner:
        yield from _account(graph, planner, PLANNER_RULES, [planner])
    yield _pods_service(graph)
    frontends = [component for component in spec.components if component.type == "frontend"]
    if frontends:
        yield _frontend_service(graph, http_port(spec, frontends[0]))
    yield _network_policy(graph, [http_port(spec, component) for component in frontends])


def _account(
    graph: GraphKey, name: str, rules: Sequence[Mapping[str, Any]], accounts: Sequence[str]
) -> Iterator[Object]:
    role, binding = object_name(name, "role"), object_name(name, "binding")
    yield {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": graph.metadata(name)}
    yield {
        "apiVersion": f"{RBAC}/v1",
        "kind": "Role",
        "metadata": graph.metadata(role),
        "rules": [dict(rule) for rule in rules],
    }
    yield {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": graph.metadata(binding),
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role},
        "subjects": [
            {"kind": "ServiceAccount", "name": account, "namespace": graph.namespace}
            for account in accounts
        ],
    }


def _pods_service(graph: GraphKey) -> Object:
    """Return the headless Service by whose EndpointSlices processes find each other."""
    labels = {DISCOVERY_LABEL: "true"}
    port = {"name": "status", "port": STATUS_PORT, "targetPort": STATUS_PORT, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": graph.metadata(object_name(graph.name, "pods"), labels),
        "spec": {
            "clusterIP": "None",
            "selector": {GRAPH_LABEL: bounded(graph.name)},
            "ports": [port],
        },
    }


def _frontend_service(graph: GraphKey, target: int) -> Object:
    port = {"name": "http", "port": HTTP_PORT, "targetPort": target, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": graph.metadata(object_name(graph.name, "frontend")),
        "spec": {
            "selector": {GRAPH_LABEL: bounded(graph.name), TYPE_LABEL: "frontend"},
            "ports": [port],
        },
    }


def _network_policy(graph: GraphKey, ports: Sequence[int]) -> Object:
    """Return the policy by which only pods of the graph reach its planes. Others reach the ports of
    HTTP and of metrics."""
    open_ports = [{"port": port, "protocol": "TCP"} for port in sorted({*ports, STATUS_PORT})]
    pods = {"matchLabels": {GRAPH_LABEL: bounded(graph.name)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": graph.metadata(bounded(graph.name)),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}, {"ports": open_ports}],
        },
    }


def component_objects(graph: GraphKey, component: ComponentSpec) -> Iterator[Object]:
    """Yield what a component has beside its workloads: a PodDisruptionBudget, an adapter."""
    name = object_name(graph.name, component.name)
    labels = {COMPONENT_LABEL: bounded(component.name.lower())}
    yield {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": graph.metadata(name, labels),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(graph.name, component.name)},
        },
    }


def adapter(graph: GraphKey, component: ComponentSpec) -> Object:
    """Return the adapter by which autoscalers change the replicas of a component."""
    reference = {"name": graph.name, "componentName": component.name}
    labels = {
        COMPONENT_LABEL: bounded(component.name.lower()),
        TYPE_LABEL: component.type or "worker",
    }
    return {
        "apiVersion": f"{GROUP}/{BETA}",
        "kind": ADAPTER,
        "metadata": graph.metadata(object_name(graph.name, component.name), labels),
        "spec": {"dgdRef": reference, "replicas": component.replicas},
    }
