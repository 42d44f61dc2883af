"""`dynamo kubernetes status`: the graphs of a cluster, and why one does not serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.communication.kubernetes.link import FORBIDDEN, AllowedStatuses, open_link
from dynamo.operations.operator.kinds import BETA, GRAPH, GROUP, GraphStatus
from dynamo.operations.operator.status import read_status

REQUEST_S = 10.0


def print_status(namespace: str) -> int:
    """Print all graphs, or those of a namespace. Returns 1 if one of them does not serve. Raises
    `PlaneUnavailable`."""
    graphs = asyncio.run(_list_graphs(namespace))
    if not graphs:
        print(f"no graphs {'in ' + namespace if namespace else 'in the cluster'}")
    for graph in graphs:
        print("\n".join(describe_graph(graph)))
    return 0 if all(_current(graph).state == "successful" for graph in graphs) else 1


def describe_graph(graph: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for a graph, its components, and the conditions that tell of a fault."""
    metadata, status = graph["metadata"], _current(graph)
    yield f"{metadata.get('namespace', '')}/{metadata['name']}: {status.state}"
    for name, part in status.components.items():
        count = f"{part.ready_replicas} of {part.replicas} ready"
        yield f"  {name}: {count}, {part.updated_replicas} of the present manifest"
    for row in status.conditions:
        bad = "True" if row.type == "ScalingConflict" else "False"
        if row.status == bad or row.reason == "NoEffect":
            yield f"  {row.type}: {row.reason}"
            yield from (f"    {line}" for line in row.message.replace("; ", "\n").splitlines())


def _current(graph: Mapping[str, Any]) -> GraphStatus:
    """Return the status of a graph. Of an older manifest it is that of one that begins."""
    status = read_status(graph)
    if status.observed_generation != graph["metadata"].get("generation", 0):
        status.state = "initializing"
    return status


async def _list_graphs(namespace: str) -> Sequence[Mapping[str, Any]]:
    link = open_link(REQUEST_S)
    where = f"namespaces/{namespace}/" if namespace else ""
    path = f"/apis/{GROUP}/{BETA}/{where}{GRAPH.lower()}s"
    try:
        graphs: Sequence[Mapping[str, Any]] = msgspec.json.decode(await link.request("GET", path))[
            "items"
        ]
        if namespace and not graphs:
            with AllowedStatuses(FORBIDDEN):
                await link.request("GET", f"/api/v1/namespaces/{namespace}")
    finally:
        await link.close()
    return graphs
