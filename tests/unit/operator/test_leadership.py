"""Two operators and one Lease: one writes at a time, and stops before its Lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.kubernetes import KubernetesClient, account_environment
from tests.support.kubernetes_graphs import CRDS, GraphCluster, component, graph

from dynamo.communication.kubernetes.link import KubernetesLink, open_link
from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError
from dynamo.operations.operator.pods import PodOptions
from dynamo.services.operator import process as lease_module
from dynamo.services.operator.process import GraphOperator, LeaderLease, LeaseTimes, check_kinds
from dynamo.testing.kubernetes.documents import VERSION

TIMES = LeaseTimes(duration_s=1, renew_limit_s=0.6, retry_s=0.05)
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/dynamo-operator"
GRAPH = graph(component("Frontend", "frontend"), component("decode", "decode"))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[GraphCluster]:
    async with GraphCluster(tmp_path) as cluster:
        yield cluster


class Contender:
    """An operator with its own link."""

    def __init__(self, cluster: GraphCluster, folder: Path, namespace: str = "") -> None:
        environ = account_environment(cluster.server.url, cluster.token, folder)
        self.link: KubernetesLink = open_link(0.3, environ)
        clock, options = SystemClock(), PodOptions()
        self.operator = GraphOperator(self.link, clock, options, namespace, TIMES)

    async def __aenter__(self) -> GraphOperator:
        return await self.operator.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self.operator.__aexit__(*error)
        await self.link.close()


async def test_the_second_waits_until_the_first_is_gone(
    cluster: GraphCluster, tmp_path: Path
) -> None:
    first, second = (Contender(cluster, tmp_path / name) for name in ("a", "b"))
    async with second as waiting:
        async with first as leading:
            await cluster.until(lambda: leading.lease.is_held != waiting.lease.is_held)
            await cluster.apply(GRAPH)
            await cluster.until(lambda: cluster.state() == "successful")
            for _ in range(30):
                assert not (leading.lease.is_held and waiting.lease.is_held)
                await asyncio.sleep(0.01)
        await cluster.until(lambda: waiting.lease.is_held)
        await cluster.apply(graph(*GRAPH["spec"]["components"], component("more", "worker")))
        await cluster.until(lambda: cluster.state() == "successful")


async def test_who_cannot_renew_stops_writing_and_goes_on_later(
    cluster: GraphCluster, tmp_path: Path
) -> None:
    async with Contender(cluster, tmp_path / "a") as operator:
        await cluster.until(lambda: operator.lease.is_held)
        await cluster.apply(GRAPH)
        await cluster.until(lambda: cluster.state() == "successful")
        cluster.server.faults.code = 500
        await cluster.until(operator.lease.lost.is_set)
        assert not operator.lease.is_held
        cluster.server.faults.code = 0
        await cluster.until(lambda: operator.lease.is_held)
        await cluster.client.send("DELETE", "/api/v1/namespaces/default/services/llm-frontend")
        await cluster.until(lambda: len(cluster.items("services")) == 2)


async def test_a_lease_of_somebody_else_is_respected_until_it_ends(
    cluster: GraphCluster, tmp_path: Path
) -> None:
    spec = {"holderIdentity": "another", "leaseDurationSeconds": 1}
    path = LEASE.rpartition("/")[0]
    await cluster.client.create(path, {"metadata": {"name": "dynamo-operator"}, "spec": spec})
    async with Contender(cluster, tmp_path / "a") as operator:
        assert not operator.lease.is_held
        await cluster.until(lambda: operator.lease.is_held)
        lease = await cluster.client.get(LEASE)
        assert lease["spec"]["leaseTransitions"] == 1


async def test_a_lease_of_a_namespace_that_is_not_renewed_ends(
    cluster: GraphCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "MAX_DURATION_S", 1)
    spec = {"holderIdentity": "a tenant", "leaseDurationSeconds": 1_000_000}
    path = LEASE.rpartition("/")[0].replace("kube-system", "default")
    await cluster.client.create(path, {"metadata": {"name": "dynamo-operator"}, "spec": spec})
    async with Contender(cluster, tmp_path / "a") as operator:
        await cluster.until(lambda: operator.lease.is_held)


async def test_one_operator_of_all_namespaces_or_one_of_each(
    cluster: GraphCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.client.create("/api/v1/namespaces", {"metadata": {"name": "lab"}})

    def warnings(text: str) -> int:
        errors = (record.__dict__.get("fields", {}).get("error", "") for record in caplog.records)
        return sum(text in error for error in errors)

    async with AsyncExitStack() as stack:

        async def start(name: str, namespace: str = "") -> GraphOperator:
            contender = Contender(cluster, tmp_path / name, namespace)
            return await stack.enter_async_context(contender)

        lab, own = await start("lab", "lab"), await start("own", "default")
        await cluster.until(lambda: lab.lease.is_held and own.lease.is_held)
        everywhere = await start("all")
        await cluster.until(lambda: warnings("is the operator of namespace ") == 1)
        for _ in range(20):
            assert lab.lease.is_held
            assert own.lease.is_held
            assert not everywhere.lease.is_held
            await asyncio.sleep(0.01)
        await lab.__aexit__()
        await own.__aexit__()
        await cluster.until(lambda: everywhere.lease.is_held)
        later = await start("later", "lab")
        text = "is the operator of all namespaces (Lease kube-system/dynamo-operator): stop it"
        await cluster.until(lambda: warnings(text) == 1)
        assert not later.lease.is_held
        await everywhere.__aexit__()
        await cluster.until(lambda: later.lease.is_held)


async def test_never_both_lead_that_start_at_once(cluster: GraphCluster, tmp_path: Path) -> None:
    for number in range(5):
        names = (f"all-{number}", ""), (f"own-{number}", "default")
        contenders = [Contender(cluster, tmp_path / name, where) for name, where in names]
        await asyncio.gather(*(contender.__aenter__() for contender in contenders))
        first, second = (contender.operator.lease for contender in contenders)
        held = 0
        while held < 20:
            assert not (first.is_held and second.is_held)
            held += first.is_held or second.is_held
            await asyncio.sleep(0.005)
        for contender in contenders:
            await contender.__aexit__()


async def test_why_there_is_no_lease_is_logged_once(
    cluster: GraphCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = account_environment(cluster.server.url, cluster.token, tmp_path / "a")
    link = open_link(5.0, environ)
    lease = LeaderLease(link, "nowhere", "a", SystemClock(), TIMES)
    task = asyncio.create_task(lease.run())
    await cluster.until(lambda: sum("nowhere" in text for text in cluster.server.requests) > 4)
    task.cancel()
    (record,) = (record for record in caplog.records if "no lease" in record.message)
    assert "nowhere" in record.__dict__["fields"]["error"]
    await link.close()


async def test_the_version_of_the_server_is_read_once(
    cluster: GraphCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Contender(cluster, tmp_path / "a"):
        pass
    assert sum("/version" in text for text in cluster.server.requests) == 1
    monkeypatch.setitem(VERSION, "minor", "19")
    old = Contender(cluster, tmp_path / "b")
    with pytest.raises(ConfigError, match="the API server is v1"):
        await old.operator.__aenter__()
    await old.link.close()


async def test_kinds_of_another_operator_are_named(cluster: GraphCluster, tmp_path: Path) -> None:
    client: KubernetesClient = cluster.client
    name = "dynamographdeployments.nvidia.com"
    environ = account_environment(cluster.server.url, cluster.token, tmp_path / "a")
    link = open_link(5.0, environ)
    await check_kinds(link)
    patch = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}}}
    await client.send("PATCH", f"{CRDS}/{name}", patch, "application/merge-patch+json")
    await check_kinds(link)
    patch["metadata"]["labels"]["app.kubernetes.io/part-of"] = "another"
    await client.send("PATCH", f"{CRDS}/{name}", patch, "application/merge-patch+json")
    with pytest.raises(ConfigError, match="managed by Helm"):
        await check_kinds(link)
    await client.send("DELETE", f"{CRDS}/{name}")
    with pytest.raises(ConfigError, match=f"has no kind {name}"):
        await check_kinds(link)
    await link.close()
