"""Pods of a real API server as processes: the kubelet of the test cluster runs on a mirror of it."""

from __future__ import annotations

import asyncio
import os
import sysconfig
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
from tests.support.control_plane import TOKEN, ControlPlane
from tests.support.kubernetes import MERGE, KubernetesClient, account_environment

from dynamo.communication.kubernetes.link import open_link
from dynamo.communication.kubernetes.reflector import Metadata, ObjectChange, Reflector
from dynamo.core.tasks import BackgroundTasks
from dynamo.testing.kubernetes.cluster import NODE
from dynamo.testing.kubernetes.controllers.endpoints import SLICES
from dynamo.testing.kubernetes.kubelet.container import Terms
from dynamo.testing.kubernetes.kubelet.pods import Kubelet
from dynamo.testing.kubernetes.kubelet.proxies import ServiceProxy, claim_subnet
from dynamo.testing.kubernetes.server import ApiServer
from dynamo.testing.kubernetes.store import Change, Key

RETRY_S = 0.1
PATHS = {
    "configmaps": "/api/v1/configmaps",
    "secrets": "/api/v1/secrets",
    "services": "/api/v1/services",
    SLICES: "/apis/discovery.k8s.io/v1beta1/endpointslices",
    "pods": "/api/v1/pods",
}
INHERITED = ("XDG_CACHE_HOME", "PYTHONPATH", "COVERAGE_PROCESS_START")


class ProcessPods:
    """Runs the pods that a real API server has bound to nodes. Objects are copied into a store, on
    which the kubelet and the proxy of Services run. The status of pods, and their ends, are written
    to the real server. Used with `async with`."""

    def __init__(self, plane: ControlPlane, client: KubernetesClient, folder: Path) -> None:
        self._client, self._folder, self._plane = client, folder, plane
        self._objects = ApiServer().objects
        self.store = self._objects.store
        self._tokens: dict[Key, str] = {}
        self._dirty: dict[Key, Change] = {}
        self._wake = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        node = {"metadata": {"name": "node", "labels": {"kubernetes.io/hostname": "node"}}}
        await self._client.send("POST", "/api/v1/nodes", node)
        status = {"capacity": NODE, "allocatable": NODE,
                  "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip
        await self._client.send("PATCH", "/api/v1/nodes/node/status", {"status": status}, MERGE)
        subnet, claim = claim_subnet()
        self._stack.callback(claim.close)
        parts = urlsplit(self._plane.url)
        env = {name: os.environ[name] for name in INHERITED if name in os.environ} | {
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            "KUBERNETES_SERVICE_HOST": parts.hostname or "",
            "KUBERNETES_SERVICE_PORT": str(parts.port),
        }
        terms = Terms(("dynamo",), env, 0.25, 0.5)
        folder = self._folder / "pods"
        self.kubelet = Kubelet(self._objects, folder, subnet, terms, self._account_files)
        self.proxy = ServiceProxy(self._objects)
        self._stack.push_async_callback(self.proxy.close)
        self._stack.push_async_callback(self.kubelet.close)
        self.store.watchers["pods"].add(self._on_pod)
        account = account_environment(
            self._plane.url, TOKEN, self._folder / "mirror", self._plane.ca
        )
        link = open_link(5.0, account)
        self._stack.push_async_callback(link.close)
        tasks = await self._stack.enter_async_context(BackgroundTasks())
        for kind, path in PATHS.items():
            changes: asyncio.Queue[ObjectChange[Any]] = asyncio.Queue()
            reflector = Reflector(link, path, decode, queue_to(changes))
            tasks.start(reflector.run(), f"mirror of {kind}")
            tasks.start(self._copy(kind, changes), f"copies of {kind}")
        tasks.start(self.kubelet.run(), "kubelet")
        tasks.start(self.proxy.run(), "proxy")
        tasks.start(self._write(), "status of pods")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _account_files(self, namespace: str, account: str) -> dict[str, str]:
        ca = self._plane.ca.decode()
        return {"token": self._tokens[namespace, account], "namespace": namespace, "ca.crt": ca}

    async def _copy(self, kind: str, changes: asyncio.Queue[ObjectChange[Any]]) -> None:
        """Copy changes into the store. The kubelet knows the status of its pods better."""
        while True:
            change = await changes.get()
            namespace, _, name = change.key.partition("/")
            key, item = (namespace, name), change.value
            mine = self.store.get(kind, key)
            if item is None:
                if mine is not None:
                    self.store.remove(kind, key)
                continue
            if kind == "pods":
                await self._fetch_token(
                    namespace, item["spec"].setdefault("serviceAccountName", "default")
                )
                if mine is not None and mine["metadata"]["uid"] == item["metadata"]["uid"]:
                    item = {**item, "status": mine["status"]}
            self.store.put(kind, key, item)

    async def _fetch_token(self, namespace: str, account: str) -> None:
        """Get a token of a service account, once it is there."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        while (namespace, account) not in self._tokens:
            status, answer = await self._client.send("POST", path, {"spec": {}})
            if status == 201:
                self._tokens[namespace, account] = answer["status"]["token"]
            else:
                await asyncio.sleep(RETRY_S)

    def _on_pod(self, change: Change) -> None:
        before = change.before or {}
        if change.deleted or before.get("status") != change.after.get("status"):
            metadata = change.after["metadata"]
            self._dirty[metadata["namespace"], metadata["name"]] = change
            self._wake.set()

    async def _write(self) -> None:
        """Write the status of pods to the real server, and delete those that have ended."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            dirty, self._dirty = self._dirty, {}
            for (namespace, name), change in dirty.items():
                path = f"/api/v1/namespaces/{namespace}/pods/{name}"
                uid = {"uid": change.after["metadata"]["uid"]}
                if change.deleted:
                    options = {"gracePeriodSeconds": 0, "preconditions": uid}
                    await self._client.send("DELETE", path, options)
                elif change.before is not None:
                    body = {"metadata": uid, "status": change.after["status"]}
                    await self._client.send("PATCH", f"{path}/status", body, MERGE)


def decode(metadata: Metadata, data: bytes) -> Any:
    """Decode an object."""
    del metadata
    return msgspec.json.decode(data)


def queue_to(changes: asyncio.Queue[ObjectChange[Any]]) -> Any:
    """Return a callback that queues changes."""

    def on_changes(some: Sequence[ObjectChange[Any]], after_outage: bool) -> None:
        del after_outage
        for change in some:
            changes.put_nowait(change)

    return on_changes
