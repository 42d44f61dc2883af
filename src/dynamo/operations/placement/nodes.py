"""Nodes of a cluster as Kubernetes describes them, with what their pods leave free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.operations.placement.quantity import parse_quantity, pod_requests
from dynamo.operations.placement.topology import HOST, Node

ENDED = {"Succeeded", "Failed"}


def read_nodes(objects: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the nodes among objects that take pods, less what the pods among them ask for. Raises
    `ConfigError` for quantities that are none."""
    nodes: list[Mapping[str, Any]] = []
    used: dict[str, dict[str, int]] = {}
    for item in objects:
        if item.get("kind") == "Node":
            nodes.append(item)
        elif item.get("kind") == "Pod":
            host = (item.get("spec") or {}).get("nodeName", "")
            if host and (item.get("status") or {}).get("phase") not in ENDED:
                taken = used.setdefault(host, {})
                for name, amount in _checked(item, pod_requests, item["spec"]).items():
                    taken[name] = taken.get(name, 0) + amount
    return [_read_node(item, used) for item in nodes if takes_pods(item)]


def takes_pods(node: Mapping[str, Any]) -> bool:
    """Whether pods may start on a node: ready, not cordoned, and without a taint other than one
    that GPU nodes have."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = next(
        (row["status"] for row in status.get("conditions") or () if row["type"] == "Ready"), "True"
    )
    taints = [
        taint["key"]
        for taint in spec.get("taints") or ()
        if taint.get("effect") != "PreferNoSchedule" and taint["key"] != "nvidia.com/gpu"
    ]
    return ready == "True" and not spec.get("unschedulable") and not taints


def _read_node(item: Mapping[str, Any], used: Mapping[str, Mapping[str, int]]) -> Node:
    name = item["metadata"]["name"]
    labels = {HOST: name, **(item["metadata"].get("labels") or {})}
    status = item.get("status") or {}
    texts = status.get("allocatable") or status.get("capacity") or {}
    room = {
        key: _checked(item, parse_quantity, text) for key, text in {"pods": 110, **texts}.items()
    }
    taken = used.get(name, {})
    return Node(name, labels, room, {key: room[key] - taken.get(key, 0) for key in room})


def _checked(item: Mapping[str, Any], parse: Any, value: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        name = item["metadata"].get("name", "")
        raise ConfigError(f"{item['kind']} {name}: {error}") from None
