"""Discovery by an API server beyond what every backend promises: pods, outages, rights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.kubernetes import MERGE, GraphPods, KubernetesClient, account_environment

from dynamo.communication.directory import RecordWatch
from dynamo.communication.kubernetes.discovery import KubernetesDiscovery
from dynamo.communication.kubernetes.live_records import LISTED_PREFIXES
from dynamo.core.errors import ConfigError, PlaneUnavailable, TooLarge, Unsupported
from dynamo.core.host.pids import start_ticks
from dynamo.runtime.processes.process_record import PROCESSES_PREFIX
from dynamo.runtime.supervisors import SUPERVISORS_PREFIX
from dynamo.testing.kubernetes.cluster import Cluster

OBJECTS = "/apis/nvidia.com/v1alpha1/namespaces/lab/dynamoworkermetadatas"
DISCOVERY_RULES = [
    {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    },
    {
        "apiGroups": ["nvidia.com"],
        "resources": ["dynamoworkermetadatas"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
]


class Lab:
    """A cluster with the pods of a graph, whose processes have the rights of their role alone."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.server = cluster.server
        self.client = KubernetesClient(cluster.server.url)
        self.pods = GraphPods(self.client, "lab")
        self.folder = folder / "account"
        self._stack = AsyncExitStack()
        self._uids: dict[str, str] = {}

    async def open(self, pod: str, *, url: str = "kubernetes:", ready: bool = True) -> Any:
        """Open the plane of a process in a pod. An empty name is no pod."""
        if pod and pod not in self._uids:
            self._uids[pod] = await self.pods.add(pod, ready=ready)
        own = self.pods.environment(pod, self._uids[pod]) if pod else {}
        account = account_environment(self.server.url, self.token, self.folder)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (account | own).items():
                patch.setenv(name, value)
            plane = await KubernetesDiscovery.open(url)
        self._stack.push_async_callback(plane.close)
        return plane

    async def set_up(self) -> None:
        """Create the graph's Service and the role of its pods."""
        await self.pods.create()
        rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/lab"
        role = {"metadata": {"name": "discovery"}, "rules": DISCOVERY_RULES}
        await self.client.create(f"{rbac}/roles", role)
        binding = {
            "metadata": {"name": "discovery"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": "discovery",
            },
            "subjects": [{"kind": "ServiceAccount", "name": "graph", "namespace": "lab"}],
        }
        await self.client.create(f"{rbac}/rolebindings", binding)
        self.token = self.server.access.account_token("lab", "graph")

    async def close(self) -> None:
        """Close planes and client."""
        await self._stack.aclose()
        self.client.close()


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with Cluster(bookmark_s=0.2) as cluster:
        lab = Lab(cluster, tmp_path)
        await lab.set_up()
        yield lab
        await lab.close()
        assert not cluster.server.access.refused


class View:
    """The records of a watch."""

    def __init__(self, plane: KubernetesDiscovery) -> None:
        self.plane = plane
        self.records: dict[str, bytes] = {}
        self.batches: list[dict[str, bytes | None]] = []

    async def follow(self, changes: RecordWatch) -> None:
        """Apply all batches."""
        async for batch in changes:
            self.batches.append({change.key: change.value for change in batch})
            for change in batch:
                if change.value is None:
                    self.records.pop(change.key, None)
                else:
                    self.records[change.key] = change.value


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def view(lab: Lab) -> AsyncIterator[View]:
    """The view of a frontend in a pod of its own."""
    view = View(await lab.open("reader"))
    async with view.plane.watch("/") as changes:
        task = asyncio.ensure_future(view.follow(changes))
        await until(lambda: view.batches)
        yield view
        task.cancel()


def test_the_prefixes_of_listed_pods_are_those_of_the_runtime() -> None:
    assert set(LISTED_PREFIXES) == {SUPERVISORS_PREFIX, PROCESSES_PREFIX}


async def test_records_follow_the_readiness_of_their_pod(lab: Lab, view: View) -> None:
    worker = await lab.open("worker", ready=False)
    always = {"/_supervisors/s": b"s", "/_processes/worker/p": b"p"}
    await worker.put("/ns/workers/w", b"address")
    for key, value in always.items():
        await worker.put(key, value)
    await until(lambda: view.records == always)
    assert await worker.get("/") == {"/ns/workers/w": b"address", **always}, "it sees its own pod"
    for ready in (True, False, True):
        await lab.pods.set_ready("worker", ready=ready)
        await until(lambda: ("/ns/workers/w" in view.records) is ready)  # noqa: B023
        assert view.records.items() >= always.items()
    await lab.pods.remove("worker")
    await until(lambda: not view.records)


async def test_an_address_changes_without_a_dip_of_readiness(lab: Lab, view: View) -> None:
    worker = await lab.open("worker")
    await worker.put("/ns/workers/w", b"tcp://10.1.0.1")
    await until(lambda: view.records)
    await worker.put("/ns/workers/w", b"tcp://10.1.0.2")
    await until(lambda: view.records == {"/ns/workers/w": b"tcp://10.1.0.2"})
    assert {"/ns/workers/w": None} not in view.batches


async def test_other_graphs_are_not_seen(lab: Lab, view: View) -> None:
    worker, other = await lab.open("worker"), await lab.open("worker", url="kubernetes://lab/other")
    await other.put("/ns/workers/other", b"1")
    await worker.put("/ns/workers/w", b"1")
    await until(lambda: view.records)
    assert set(view.records) == {"/ns/workers/w"}


async def test_a_burst_of_writes_is_few_requests_and_views_need_no_polling(
    lab: Lab, view: View
) -> None:
    worker = await lab.open("worker")
    await worker.get("/")
    lab.server.requests.clear()
    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(worker.put(f"/k/{number}", b"v"))
    await until(lambda: len(view.records) == 100)
    await asyncio.sleep(1.0)
    methods = [line.partition(" ")[0] for line in lab.server.requests]
    assert methods.count("POST") == 1
    assert len(methods) <= 3, lab.server.requests


async def test_each_process_has_two_watch_streams(lab: Lab) -> None:
    plane = await lab.open("worker")
    async with plane.watch("/a/") as first, plane.watch("/b/") as second:
        await anext(first)
        await anext(second)
        await until(lambda: len(lab.server._watches) == 2)
        watches = [line for line in lab.server.requests if "watch=true" in line]
        assert len(watches) == 2, watches


async def test_an_outage_leaves_views_as_they_are_and_writes_wait(lab: Lab, view: View) -> None:
    worker, leaver = await lab.open("worker"), await lab.open("leaver")
    await worker.put("/ns/a", b"1")
    await leaver.put("/ns/b", b"1")
    await until(lambda: len(view.records) == 2)
    await lab.server.stop()
    await until(lambda: worker.connection_error)
    await worker.put("/ns/a", b"2")
    with pytest.raises(PlaneUnavailable):
        await worker.get("/")
    async with worker.watch("/") as changes:
        assert len(await anext(changes)) == 2, "a new watch begins with what is known"
    assert view.records == {"/ns/a": b"1", "/ns/b": b"1"}
    await lab.server.start()
    await until(lambda: view.records["/ns/a"] == b"2")
    await until(lambda: not worker.connection_error)


async def test_an_older_backup_takes_no_record_away(lab: Lab, view: View) -> None:
    worker, later = await lab.open("worker"), await lab.open("later")
    lost: list[int] = []
    later.on_lease_lost(lambda: lost.append(1))
    await worker.put("/ns/a", b"1")
    backup = lab.server.store.backup()
    await worker.put("/ns/a", b"2")
    await later.put("/ns/b", b"1")
    await until(lambda: view.records == {"/ns/a": b"2", "/ns/b": b"1"})
    view.batches.clear()
    await lab.server.stop()
    followers = [f for p in (worker, later, view.plane) for f in (p._objects, p._slices)]
    await until(lambda: all(follower.connection_error for follower in followers))
    await lab.server.restore(backup)
    await until(lambda: lost)
    await worker.put("/ns/c", b"1")
    await until(lambda: "/ns/c" in view.records)
    await asyncio.sleep(3.0)
    assert view.records == {"/ns/a": b"2", "/ns/b": b"1", "/ns/c": b"1"}
    assert all(batch.get("/ns/b", b"") is not None for batch in view.batches)


async def test_an_object_that_somebody_deletes_is_put_again(lab: Lab, view: View) -> None:
    worker = await lab.open("worker")
    await worker.put("/ns/a", b"1")
    await until(lambda: view.records)
    (item,) = (await lab.client.get(OBJECTS))["items"]
    await lab.client.send("DELETE", f"{OBJECTS}/{item['metadata']['name']}")
    await until(lambda: {"/ns/a": None} in view.batches)
    await until(lambda: view.records == {"/ns/a": b"1"})


async def test_an_invalid_object_keeps_its_last_records(lab: Lab, view: View) -> None:
    worker = await lab.open("worker")
    await worker.put("/ns/a", b"1")
    await until(lambda: view.records)
    foreign = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": {
            "name": "foreign",
            "labels": {"nvidia.com/dynamo-graph-deployment-name": "qwen"},
        },
        "spec": {"data": {"records": {"/ns/b": "no base64!"}}},
    }
    await lab.client.create(OBJECTS, foreign)
    await worker.put("/ns/a", b"2")
    await until(lambda: view.records == {"/ns/a": b"2"})
    patch = {"spec": {"data": {"records": "text"}}}
    await lab.client.send("PATCH", f"{OBJECTS}/foreign", patch, MERGE)
    await worker.put("/ns/a", b"3")
    await until(lambda: view.records == {"/ns/a": b"3"})


async def test_an_answer_that_is_lost_is_no_second_object(lab: Lab, view: View) -> None:
    worker = await lab.open("worker")
    lab.server.faults.lost_answers = 1
    await worker.put("/ns/a", b"1")
    await until(lambda: view.records == {"/ns/a": b"1"})
    lab.server.faults.lost_answers = 1
    await worker.put("/ns/a", b"2")
    await until(lambda: view.records == {"/ns/a": b"2"})
    await worker.put("/ns/b", b"1")
    await until(lambda: len(view.records) == 2)
    assert len((await lab.client.get(OBJECTS))["items"]) == 1


async def test_records_of_dead_processes_are_deleted(lab: Lab, view: View) -> None:
    supervisor, child = await lab.open("worker"), await lab.open("worker")
    await supervisor.put("/_supervisors/s", b"1")
    await child.put("/ns/workers/w", b"1")
    await child.put("/_processes/worker/w", b"1")
    await until(lambda: len(view.records) == 3)
    await supervisor.revoke_lease_of("/_processes/worker/w")
    await until(lambda: set(view.records) == {"/_supervisors/s"})


async def test_a_container_deletes_what_its_dead_predecessor_left(lab: Lab, view: View) -> None:
    worker = await lab.open("worker")
    await worker.put("/ns/workers/w", b"1")
    await until(lambda: view.records)
    (item,) = (await lab.client.get(OBJECTS))["items"]
    ticks = start_ticks(os.getpid())
    for name, process in (
        ("dead", {"container": "main", "pid": os.getpid(), "start_ticks": ticks - 1}),
        ("sidecar", {"container": "sidecar", "pid": os.getpid(), "start_ticks": ticks - 1}),
    ):
        metadata = {key: item["metadata"][key] for key in ("labels", "ownerReferences")}
        records = {f"/ns/workers/{name}": "MQ=="}
        spec = {"data": {"process": process, "records": records}}
        copy = item | {"metadata": {"name": name, **metadata}, "spec": spec}
        await lab.client.create(OBJECTS, copy)
    await until(lambda: len(view.records) == 3)
    await lab.open("worker")
    await until(lambda: set(view.records) == {"/ns/workers/w", "/ns/workers/sidecar"})


async def test_records_that_are_too_large_are_refused(lab: Lab) -> None:
    worker = await lab.open("worker")
    await worker.put("/a", b"x" * 500_000)
    with pytest.raises(TooLarge, match="'/b' of 500000 bytes"):
        await worker.put("/b", b"x" * 500_000)
    await worker.put("/a", b"y" * 500_000)


async def test_a_process_in_no_pod_may_only_watch(lab: Lab) -> None:
    worker = await lab.open("worker")
    await worker.put("/ns/a", b"1")
    outsider = await lab.open("", url="kubernetes://lab/qwen")
    assert await outsider.get("/") == {"/ns/a": b"1"}
    with pytest.raises(Unsupported, match="is in no pod and may only watch"):
        await outsider.put("/ns/b", b"1")


@pytest.mark.parametrize("url", ["kubernetes:lab", "kubernetes://lab/a/b"])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a discovery by Kubernetes"):
        await KubernetesDiscovery.open(url)
