"""The connector `kubernetes`: the workers of a graph, whose adapters have their numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from dynamo.communication.kubernetes.link import MERGE_PATCH, KubernetesLink, open_link
from dynamo.core.errors import ConfigError, NotFound
from dynamo.operations.operator.kinds import ADAPTER, BETA, GROUP, WORKER_TYPES
from dynamo.operations.operator.names import COMPONENT_LABEL, GRAPH_LABEL, TYPE_LABEL, bounded
from dynamo.operations.operator.status import is_ready, pod_problem
from dynamo.operations.placement.quantity import GPU, pod_requests
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.values import KindState, Order
from dynamo.runtime.distributed import DistributedRuntime

REQUEST_S = 5.0
MANAGER = "dynamo-planner"


class KubernetesConnector(Connector):
    """Reads and orders replicas through `/scale`, as autoscalers do. A kind is a component of
    workers with `scalingAdapter`."""

    def __init__(
        self, runtime: DistributedRuntime | None = None, link: KubernetesLink | None = None
    ) -> None:
        """Raises `ConfigError` outside of a graph's pods."""
        del runtime
        graph = os.environ.get("DYN_PARENT_DGD_K8S_NAME", "")
        if not graph:
            raise ConfigError(
                "planner.connector kubernetes: this process is in no pod of a graph",
                hint="set DYN_PARENT_DGD_K8S_NAME and DYN_PARENT_DGD_K8S_NAMESPACE",
            )
        self._link = link or open_link(REQUEST_S)
        namespace = os.environ.get("DYN_PARENT_DGD_K8S_NAMESPACE") or self._link.namespace
        self._selector = urlencode({"labelSelector": f"{GRAPH_LABEL}={bounded(graph)}"})
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._adapters = f"/apis/{GROUP}/{BETA}/namespaces/{namespace}/{ADAPTER.lower()}s"
        self._numbers: set[int] = set()

    async def observe(self) -> Mapping[str, KindState]:
        adapters = await self._list(self._adapters)
        pods = await self._list(self._pods)
        kinds = {}
        for role, adapter in _by_component(adapters).items():
            own = [pod for pod in pods if _label(pod, COMPONENT_LABEL) == role]
            kind = _label(own[0], TYPE_LABEL) if own else _label(adapter, TYPE_LABEL)
            if kind in WORKER_TYPES:
                kinds[role] = _state(adapter["spec"]["replicas"], kind, own)
        if not kinds:
            raise NotFound(
                "no component of workers can be scaled", hint="give one `scalingAdapter: {}`"
            )
        return kinds

    async def scale(self, order: Order) -> None:
        if order.number in self._numbers:
            return
        adapter = _by_component(await self._list(self._adapters)).get(order.kind)
        if adapter is None:
            raise NotFound(f"no component {order.kind} can be scaled")
        path = f"{self._adapters}/{adapter['metadata']['name']}/scale?fieldManager={MANAGER}"
        body = {"spec": {"replicas": order.count}}
        await self._link.request("PATCH", path, body, content_type=MERGE_PATCH)
        self._numbers.add(order.number)

    async def close(self) -> None:
        await self._link.close()

    async def _list(self, path: str) -> Sequence[Any]:
        body = await self._link.request("GET", f"{path}?{self._selector}")
        items: Sequence[Any] = msgspec.json.decode(body)["items"]
        return items


def _by_component(adapters: Sequence[Any]) -> Mapping[str, Any]:
    return {_label(adapter, COMPONENT_LABEL): adapter for adapter in adapters}


def _label(item: Any, name: str) -> str:
    return str((item["metadata"].get("labels") or {}).get(name, ""))


def _state(wanted: int, kind: str, pods: Sequence[Any]) -> KindState:
    """Return the state of a component by its pods."""
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    ready = sum(map(is_ready, staying))
    problems = [problem for pod in staying if (problem := pod_problem(pod))]
    gpus = pod_requests(pods[0]["spec"]).get(GPU, 0) // 1000 if pods else 0
    return KindState(
        wanted,
        ready,
        len(staying) - ready,
        len(pods) - len(staying),
        problems[0] if problems else "",
        gpus=gpus or 1,
        role="both" if kind == "worker" else kind,  # type: ignore[arg-type]
    )
