"""An operator with the rights that it is shipped with, on a test cluster or a real API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.api_graphs import GRAPHS, Graphs
from tests.support.control_plane import TOKEN
from tests.support.kubernetes import (
    INSTALLATION,
    MERGE,
    KubernetesClient,
    account_environment,
    install_account,
    note_refusals,
)
from tests.support.kubernetes_graphs import component, graph

from dynamo.communication.kubernetes.link import open_link
from dynamo.core.clock import SystemClock
from dynamo.operations.operator.manifests import read_manifests, write_manifests
from dynamo.operations.operator.pods import PodOptions
from dynamo.services.operator.process import GraphOperator

RULES = INSTALLATION.parents[1] / "helm" / "dynamo" / "files"
ADAPTER = "dynamographdeploymentscalingadapters/llm-decode"
REFERENCES = [
    {"name": "a", "configMap": {"name": "settings", "optional": True}},
    {"name": "b", "secret": {"secretName": "keys", "optional": True}},
]


def limited_installation(namespace: str) -> str:
    """Return the installation of an operator of one namespace, as the chart has it."""
    items = {item["kind"]: item for item in read_manifests(INSTALLATION.read_text(), "operator")}
    for kind, name in (("ClusterRole", "cluster-rules"), ("Role", "namespace-rules")):
        item: dict[str, Any] = {**items["ClusterRole"], "kind": kind}
        item["rules"] = yaml.safe_load((RULES / f"{name}.yaml").read_text())
        items[kind] = item
    binding = items["ClusterRoleBinding"]
    reference = {**binding["roleRef"], "kind": "Role"}
    items["RoleBinding"] = {**binding, "kind": "RoleBinding", "roleRef": reference}
    for kind in ("Role", "RoleBinding"):
        metadata = {**items[kind]["metadata"], "namespace": namespace}
        items[kind] = {**items[kind], "metadata": metadata}
    del items["Deployment"]
    return write_manifests(list(items.values()))


def manifest(image: str = "dynamo:1", **more: Any) -> dict[str, Any]:
    """Return a graph with all that an operator has rights for here."""
    worker = component("decode", "decode", 2, image=image, scalingAdapter={})
    worker["podTemplate"]["spec"]["volumes"] = REFERENCES
    parts = component("Frontend", "frontend"), worker, component("plan", "planner")
    item = graph(*parts, **more)
    item["metadata"]["annotations"] = {"nvidia.com/dynamo-gang": "true"}
    return item


@pytest.fixture(params=["", "default"])
async def graphs(
    request: pytest.FixtureRequest, api_server: tuple[str, bytes], tmp_path: Path
) -> AsyncIterator[Graphs]:
    """Graphs under an operator of all namespaces, or of one. No request may be refused."""
    url, ca = api_server
    async with AsyncExitStack() as stack:
        client = KubernetesClient(url, TOKEN, ca)
        stack.callback(client.close)
        graphs = Graphs(client, {})
        await graphs.start()
        stack.push_async_callback(graphs.close)
        limited = limited_installation(request.param) if request.param else ""
        token, refused = await install_account(client, limited), list[str]()
        stack.push_async_callback(remove_account, client)
        assert await is_refused(KubernetesClient(url, token, ca), "/api/v1/secrets")
        account = account_environment(url, token, tmp_path / "account", ca)
        link = note_refusals(open_link(5.0, account), refused)
        stack.push_async_callback(link.close)
        operator = GraphOperator(link, SystemClock(), PodOptions(), request.param)
        await stack.enter_async_context(operator)
        yield graphs
        assert not refused


async def is_refused(client: KubernetesClient, path: str) -> bool:
    """Return whether a server that holds accounts to their roles refuses a request."""
    status, _ = await client.send("GET", path)
    client.close()
    return status == 403


async def remove_account(client: KubernetesClient) -> None:
    """Take the rights away, since a module has one API server."""
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    for path in ("clusterrolebindings", "namespaces/default/rolebindings"):
        await client.send("DELETE", f"{rbac}/{path}/dynamo-operator")


async def test_create_scale_update_delete(graphs: Graphs) -> None:
    await graphs.apply(manifest())
    await graphs.until(graphs.state, "successful")
    scale = graphs.path(f"{ADAPTER}/scale")
    status, body = await graphs.client.send("PATCH", scale, {"spec": {"replicas": 3}}, MERGE)
    assert status == 200, body

    async def replicas() -> int:
        return int((await graphs.client.get(scale))["status"]["replicas"])

    await graphs.until(replicas, 3)
    await graphs.until(graphs.state, "successful")
    old = await graphs.names("deployments")
    await graphs.apply(manifest("dynamo:2"))
    await graphs.until(graphs.state, "successful")
    assert not old & await graphs.names("deployments")
    await graphs.apply(manifest("dynamo:2", restart={"id": "1"}))
    await graphs.until(graphs.state, "successful")
    events = await graphs.client.get("/api/v1/namespaces/default/events")
    assert {"Applied", "Deleted"} <= {item["reason"] for item in events["items"]}
    await graphs.client.send("DELETE", graphs.path(f"{GRAPHS}/llm"))
    for plural in ("deployments", "services", "roles", "secrets", "pods"):
        await graphs.until(lambda plural=plural: graphs.names(plural), set())
