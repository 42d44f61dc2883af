"""Pods of the test cluster are processes: environment, volumes, probes, restarts, ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.support.kubernetes import KubernetesClient

from dynamo.testing.kubernetes.kubelet.cluster import PodCluster

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
CORE = "/api/v1/namespaces/default"
SERVER = """
import http.server, os, pathlib, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = pathlib.Path(self.path)
        code = 200 if self.path in ("/", "/live") or path.exists() else 503
        self.send_response(code)
        self.end_headers()
        self.wfile.write(os.environ["POD_NAME"].encode())
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), os._exit(int(sys.argv[2]))))
print("listening", flush=True)
http.server.HTTPServer((sys.argv[1], 8000), Handler).serve_forever()
"""
NAMES = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]


@pytest.fixture
async def cluster() -> AsyncIterator[PodCluster]:
    async with PodCluster(images=("python",), probe_s=0.05, backoff_s=0.05) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: PodCluster) -> AsyncIterator[KubernetesClient]:
    client = KubernetesClient(cluster.server.url, cluster.token)
    yield client
    client.close()


def pod_of(program: str, *arguments: str, name: str = "p", **container: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "python:3", "command": [sys.executable, "-c", program],
            "args": list(arguments), "env": NAMES, **container}  # fmt: skip
    return {"metadata": {"name": name, "labels": {"app": "a"}}, "spec": {"containers": [main]}}


async def until(
    client: KubernetesClient, holds: Callable[[Any], bool], path: str = f"{CORE}/pods/p"
) -> Any:
    """Watch an object until it is as wanted, and return it."""
    folder, _, name = path.rpartition("/")
    async with asyncio.timeout(60), client.watch(
        folder, fieldSelector=f"metadata.name={name}"
    ) as events:  # fmt: skip
        while True:
            kind, item = await events.get()
            if kind == "DELETED" and holds({}):
                return {}
            if kind != "DELETED" and holds(item):
                return item


async def logged(cluster: PodCluster, text: bytes) -> None:
    """Wait until the pod `p` has written a text."""
    async with asyncio.timeout(60):
        while ("default", "p") not in cluster.kubelet.runs:
            await asyncio.sleep(0.01)
        while text not in cluster.kubelet.read_log(("default", "p"), {}):
            await asyncio.sleep(0.01)


def state(pod: Any) -> Any:
    (container,) = pod.get("status", {}).get("containerStatuses") or ({"state": {}},)
    return container["state"]


def is_ready(pod: Any) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def test_variables_and_files_come_from_objects(
    cluster: PodCluster, client: KubernetesClient
) -> None:
    await client.create(
        f"{CORE}/configmaps", {"metadata": {"name": "c"}, "data": {"COLOR": "red", "f.json": "{}"}}
    )
    await client.create(
        f"{CORE}/secrets", {"metadata": {"name": "s"}, "stringData": {"token": "hidden"}}
    )
    program = (
        "import os, pathlib, sys; e = os.environ; "
        "print(e['COLOR'], e['T'], e['BOTH'], e['IP'], pathlib.Path(sys.argv[1]).read_text())"
    )
    env = [
        {"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "no", "key": "x",
                                                           "optional": True}}},
        {"name": "BOTH", "value": "$(COLOR)-$(T)-$$(T)-$(NO)"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]  # fmt: skip
    body = pod_of(program, "/etc/dynamo/sub/g.json", env=env,
                  envFrom=[{"configMapRef": {"name": "c"}}],
                  volumeMounts=[{"name": "v", "mountPath": "/etc/dynamo"}])  # fmt: skip
    items = [{"key": "f.json", "path": "sub/g.json"}]
    body["spec"] |= {
        "restartPolicy": "Never", "volumes": [{"name": "v", "configMap": {"name": "c",
                                                                         "items": items}}],
    }  # fmt: skip
    await client.create(f"{CORE}/pods", body)
    pod = await until(client, lambda pod: pod["status"]["phase"] == "Succeeded")
    address = pod["status"]["podIP"].replace("10.", "127.", 1)
    log = cluster.kubelet.read_log(("default", "p"), {}).decode()
    assert log == f"red hidden red-hidden-$(T)-$(NO) {address} {{}}\n"


async def test_pod_waits_for_what_it_refers_to(client: KubernetesClient) -> None:
    env = [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}}]
    body = pod_of("", env=env)
    body["spec"]["restartPolicy"] = "Never"
    await client.create(f"{CORE}/pods", body)
    pod = await until(client, lambda pod: "CreateContainerConfigError" in str(state(pod)))
    assert state(pod)["waiting"]["message"] == 'secret "s" not found'
    await client.create(
        f"{CORE}/secrets", {"metadata": {"name": "s"}, "stringData": {"token": "1"}}
    )
    await until(client, lambda pod: pod["status"]["phase"] == "Succeeded")


async def test_unknown_image_is_not_pulled(client: KubernetesClient) -> None:
    await client.create(f"{CORE}/pods", pod_of("", image="other:1"))
    pod = await until(client, lambda pod: "ImagePullBackOff" in str(state(pod)))
    assert pod["status"]["phase"] == "Pending"


async def test_failing_container_is_started_again(client: KubernetesClient) -> None:
    await client.create(f"{CORE}/pods", pod_of("import sys; sys.exit(3)"))
    pod = await until(client, lambda pod: "CrashLoopBackOff" in str(state(pod)))
    (status,) = pod["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert status["restartCount"] >= 1


async def test_output_of_a_failed_container_can_be_read_while_it_waits() -> None:
    async with PodCluster(images=("python",), probe_s=0.05, backoff_s=300.0) as cluster:
        client = KubernetesClient(cluster.server.url, cluster.token)
        program = "import sys; print('wrong flag'); sys.exit(3)"
        await client.create(f"{CORE}/pods", pod_of(program))
        await until(client, lambda pod: "CrashLoopBackOff" in str(state(pod)))
        assert cluster.kubelet.read_log(("default", "p"), {}) == b"wrong flag\n"
        client.close()


async def test_readiness_follows_the_probe_and_services_listen(
    cluster: PodCluster, client: KubernetesClient
) -> None:
    probe = {"httpGet": {"path": str(cluster.folder / "ready"), "port": "http"},
             "periodSeconds": 1, "failureThreshold": 1}  # fmt: skip
    body = pod_of(SERVER, "0.0.0.0", "0", readinessProbe=probe,
                  ports=[{"name": "http", "containerPort": 8000}])  # fmt: skip
    await client.create(f"{CORE}/pods", body)
    spec = {"selector": {"app": "a"}, "ports": [{"port": 80 + 8000, "targetPort": "http"}]}
    service = await client.create(f"{CORE}/services", {"metadata": {"name": "s"}, "spec": spec})
    pod = await until(client, lambda pod: "running" in state(pod))
    assert not is_ready(pod)
    (cluster.folder / "ready").touch()
    await until(client, is_ready)
    address = service["spec"]["clusterIP"].replace("10.", "127.", 1)
    frontend = KubernetesClient(f"http://{address}:8080")
    async with asyncio.timeout(30):
        while True:
            try:
                answer = await frontend._client.send("GET", "/")
                break
            except OSError:  # the proxy has not seen the slice
                await asyncio.sleep(0.02)
    assert answer.body == b"p"
    (cluster.folder / "ready").unlink()
    await until(client, lambda pod: not is_ready(pod))
    frontend.close()


async def test_liveness_restarts_a_container(cluster: PodCluster, client: KubernetesClient) -> None:
    alive = cluster.folder / "alive"
    alive.touch()
    probe = {"httpGet": {"path": str(alive), "port": 8000}, "periodSeconds": 1,
             "failureThreshold": 1}  # fmt: skip
    startup = {"httpGet": {"path": "/live", "port": 8000}, "failureThreshold": 30}
    body = pod_of(SERVER, "0.0.0.0", "7", livenessProbe=probe, startupProbe=startup)
    await client.create(f"{CORE}/pods", body)
    await until(client, is_ready)
    alive.unlink()
    pod = await until(client, lambda pod: pod["status"]["containerStatuses"][0]["restartCount"] > 0)
    (status,) = pod["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["exitCode"] == 7
    alive.touch()


async def test_deletion_waits_for_the_process(
    cluster: PodCluster, client: KubernetesClient
) -> None:
    await client.create(f"{CORE}/pods", pod_of(SERVER, "0.0.0.0", "0"))
    await logged(cluster, b"listening")
    run = cluster.kubelet.run_of("p")
    process = run.containers[0].process
    assert process is not None
    await client.send("DELETE", f"{CORE}/pods/p")
    await until(client, lambda pod: not pod)
    assert process.returncode == 0
    assert not run.files.folder.exists()


async def test_first_containers_and_hooks_run(
    cluster: PodCluster, client: KubernetesClient
) -> None:
    place = {"name": "v", "mountPath": "/shared"}
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    body = pod_of(SERVER, "0.0.0.0", "0", volumeMounts=[place])
    main = body["spec"]["containers"][0]
    hook = [sys.executable, "-c", write, str(cluster.folder / "stopped"), "x"]
    main["lifecycle"] = {"preStop": {"exec": {"command": hook}}}
    main["readinessProbe"] = {"exec": {"command": ["cat", "/dev/null"]}}
    first = pod_of(write, "/shared/file", "from init", volumeMounts=[place])["spec"]["containers"]
    body["spec"] |= {"initContainers": first, "volumes": [{"name": "v", "emptyDir": {}}]}
    await client.create(f"{CORE}/pods", body)
    pod = await until(client, is_ready)
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    assert (cluster.kubelet.run_of("p").files.folder / "volumes/v/file").read_text() == "from init"
    await client.send("DELETE", f"{CORE}/pods/p")
    await until(client, lambda pod: not pod)
    assert (cluster.folder / "stopped").exists()


async def test_mounted_files_follow_their_objects(
    cluster: PodCluster, client: KubernetesClient
) -> None:
    data = {"metadata": {"name": "c"}, "data": {"a": "1"}}
    await client.create(f"{CORE}/configmaps", data)
    labels = {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels['app']"}}
    sources = [{"configMap": {"name": "c"}}, {"downwardAPI": {"items": [labels]}}]
    body = pod_of(SERVER, "0.0.0.0", "0", volumeMounts=[{"name": "v", "mountPath": "/etc/v"}])
    body["spec"]["volumes"] = [{"name": "v", "projected": {"sources": sources}}]
    await client.create(f"{CORE}/pods", body)
    await until(client, is_ready)
    folder = cluster.kubelet.run_of("p").files.folder / "volumes" / "v"
    assert [(folder / name).read_text() for name in ("a", "labels")] == ["1", "a"]
    data["data"] = {"a": "2"}
    await client.send("PUT", f"{CORE}/configmaps/c", data)
    async with asyncio.timeout(60):
        while (folder / "a").read_text() != "2":
            await asyncio.sleep(0.01)


async def test_stubborn_process_is_killed(cluster: PodCluster, client: KubernetesClient) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
    body = pod_of(program + "time.sleep(600)")
    body["spec"]["terminationGracePeriodSeconds"] = 1
    await client.create(f"{CORE}/pods", body)
    await logged(cluster, b"up")
    process = cluster.kubelet.run_of("p").containers[0].process
    assert process is not None
    await client.send("DELETE", f"{CORE}/pods/p")
    await until(client, lambda pod: not pod)
    assert process.returncode == -9


async def test_memory_eviction_and_loss_of_a_node(
    cluster: PodCluster, client: KubernetesClient
) -> None:
    for name in ("oom", "evicted", "lost"):
        await client.create(f"{CORE}/pods", pod_of(SERVER, "0.0.0.0", "0", name=name))
        await until(client, is_ready, f"{CORE}/pods/{name}")
    cluster.kubelet.run_of("oom").containers[0].kill("OOMKilled")
    pod = await until(
        client, lambda pod: pod["status"]["containerStatuses"][0]["restartCount"] == 1,
        f"{CORE}/pods/oom",
    )  # fmt: skip
    ended = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")
    cluster.kubelet.run_of("evicted").evict("The node was low on resource: memory.")
    pod = await until(
        client, lambda pod: pod["status"]["phase"] == "Failed", f"{CORE}/pods/evicted"
    )
    assert pod["status"]["reason"] == "Evicted"
    process = cluster.kubelet.run_of("lost").containers[0].process
    await cluster.kubelet.lose_node("node")
    pod = await until(client, lambda pod: not is_ready(pod), f"{CORE}/pods/lost")
    assert process is not None
    await process.wait()
    pod = await client.get(f"{CORE}/pods/lost")
    assert "deletionTimestamp" in pod["metadata"]


async def test_nothing_runs_after_the_cluster(tmp_path: Any) -> None:
    async with PodCluster(images=("python",)) as cluster:
        client = KubernetesClient(cluster.server.url, cluster.token)
        await client.create(f"{CORE}/pods", pod_of(SERVER, "0.0.0.0", "0"))
        await until(client, is_ready)
        process = cluster.kubelet.run_of("p").containers[0].process
        client.close()
    assert process is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert not cluster.folder.exists()
