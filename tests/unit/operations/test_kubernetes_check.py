"""The check of a pod by `dynamo doctor`, under the rights of a graph's pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.kubernetes import GRAPH, GraphPods, KubernetesClient, account_environment

from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.operations.doctor import checks as doctor
from dynamo.operations.doctor.kubernetes import check_kubernetes
from dynamo.operations.operator.objects import DISCOVERY_RULES
from dynamo.testing.kubernetes.cluster import Cluster

RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/lab"
OBJECTS = "/apis/nvidia.com/v1alpha1/namespaces/lab/dynamoworkermetadatas"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Pod:
    """A pod of a graph whose account has the rights of discovery."""

    def __init__(self, client: KubernetesClient, pods: GraphPods) -> None:
        self.client = client
        self.pods = pods

    async def allow(self, *rules: Any) -> None:
        """Give the account these rights alone."""
        body = {"kind": "Role", "metadata": {"name": "pods"}, "rules": rules}
        await self.client.send("DELETE", f"{RBAC}/roles/pods")
        await self.client.create(f"{RBAC}/roles", body)


@pytest.fixture
async def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pod]:
    async with Cluster() as cluster:
        client = KubernetesClient(cluster.server.url)
        pods = GraphPods(client, "lab")
        await pods.create()
        uid = await pods.add("w-0")
        token = cluster.server.access.account_token("lab", "pods")
        environment = account_environment(cluster.server.url, token, tmp_path)
        environment = {**environment, "POD_NAME": "w-0", "POD_UID": uid, "POD_NAMESPACE": "lab",
                       "DYN_PARENT_DGD_K8S_NAME": GRAPH}  # fmt: skip
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        subject = {"kind": "ServiceAccount", "name": "pods", "namespace": "lab"}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pods"}
        body = {"metadata": {"name": "pods"}, "roleRef": role, "subjects": [subject]}
        await client.create(f"{RBAC}/rolebindings", body)
        pod = Pod(client, pods)
        await pod.allow(*DISCOVERY_RULES)
        yield pod
        client.close()


async def test_a_pod_in_order(pod: Pod) -> None:
    settings = Settings(runtime=RuntimeSettings(discovery="kubernetes:"))
    finding = await asyncio.to_thread(doctor.servers, settings)
    assert finding.message.startswith("Kubernetes v1."), finding
    assert finding.message.endswith(", 1 pods; servers answer; 0 processes accept calls")
    assert (await pod.client.get(OBJECTS))["items"] == []


async def test_what_a_pod_lacks_is_named(pod: Pod) -> None:
    settings = Settings(runtime=RuntimeSettings(discovery="kubernetes:"))

    async def finding() -> str:
        """Return the text of the check of servers."""
        rows = await asyncio.to_thread(lambda: list(doctor.run_checks(settings)))
        (row,) = (row for row in rows if row.check == "servers")
        return f"{row.verdict}: {row.message}; {row.hint}"

    slices, objects = (dict(rule) for rule in DISCOVERY_RULES)
    for number, verb in enumerate(("create", "delete")):
        rest = [word for word in objects["verbs"] if word != verb]
        await pod.allow(slices, {**objects, "verbs": rest})
        text = await finding()
        assert text.startswith("fail: Kubernetes answered 403"), (number, text)
        assert f'cannot {verb} resource "dynamoworkermetadatas"' in text
    await pod.allow(objects)
    assert 'cannot list resource "endpointslices"' in await finding()
    await pod.allow(slices, objects)
    await pod.pods.remove("w-0")
    assert "lists the pod w-0; does a Service with this label and nvidia.com/dynamo-graph" in (
        await finding()
    )
    await pod.client.send("DELETE", f"{CRD}/dynamoworkermetadatas.nvidia.com")
    assert "are Dynamo's kinds installed? `dynamo kubernetes crds` prints them" in await finding()


async def test_a_namespace_without_pods(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    del pod
    monkeypatch.delenv("POD_UID")
    monkeypatch.setenv("DYN_PARENT_DGD_K8S_NAME", "other")
    assert (await check_kubernetes("kubernetes:")).endswith(", 0 pods")
