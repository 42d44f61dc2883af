"""The check of a pod by `dynamo doctor`: what discovery by Kubernetes needs."""

from __future__ import annotations

import os
from urllib.parse import urlencode

import msgspec

from dynamo.communication.kubernetes.discovery import (
    ENABLED_LABEL,
    GRAPH_LABEL,
    SLICES_GROUP,
    parse_url,
)
from dynamo.communication.kubernetes.link import NOT_FOUND, AllowedStatuses, open_link
from dynamo.communication.kubernetes.own_object import PodIdentity
from dynamo.core.errors import PlaneUnavailable

REQUEST_S = 3.0
NAME = "dynamo-doctor"


async def check_kubernetes(url: str) -> str:
    """Return the version of the API server, and how many pods of the graph it lists. Raises
    `PlaneUnavailable` for a server that is away, kinds that are missing, a right that the account
    lacks, and a pod that no EndpointSlice lists. Nothing is written."""
    namespace, graph = parse_url(url)
    pod = PodIdentity.of(os.environ)
    link = open_link(REQUEST_S)
    where = f"namespaces/{namespace or pod.namespace or link.namespace}"
    graph = graph or pod.graph
    label = f"{GRAPH_LABEL}={graph}" if graph else f"!{GRAPH_LABEL}"
    objects = f"/apis/nvidia.com/v1alpha1/{where}/dynamoworkermetadatas"
    item = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata",
            "metadata": {"name": NAME}, "spec": {}}  # fmt: skip
    try:
        version = msgspec.json.decode(await link.request("GET", "/version"))["gitVersion"]
        served = await link.served_version(SLICES_GROUP, ("v1", "v1beta1"))
        query = urlencode({"labelSelector": f"{ENABLED_LABEL}=true,{label}"})
        path = f"/apis/{SLICES_GROUP}/{served}/{where}/endpointslices?{query}"
        slices = msgspec.json.decode(await link.request("GET", path))["items"]
        await link.request("GET", f"{objects}?limit=1")
        if pod.uid:
            await link.request("POST", f"{objects}?dryRun=All", item)
            with AllowedStatuses(NOT_FOUND):
                await link.request("DELETE", f"{objects}/{NAME}?dryRun=All")
    finally:
        await link.close()
    endpoints = [endpoint for row in slices for endpoint in row.get("endpoints") or ()]
    uids = {(endpoint.get("targetRef") or {}).get("uid") for endpoint in endpoints}
    if pod.uid and pod.uid not in uids:
        raise PlaneUnavailable(
            f"no EndpointSlice with the label {ENABLED_LABEL}=true lists the pod {pod.name}",
            hint=f"does a Service with this label and {label} select the pod?",
        )
    return f"Kubernetes {version}, {len(uids)} pods"
