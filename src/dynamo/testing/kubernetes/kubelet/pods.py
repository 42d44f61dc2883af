"""The kubelet: runs the pods that are bound to nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from dynamo.core.tasks import BackgroundTasks, wait_at_most
from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.kubelet.container import RETRY_S, Container, Terms
from dynamo.testing.kubernetes.kubelet.files import LaunchError, PodFiles
from dynamo.testing.kubernetes.objects import ClusterObjects
from dynamo.testing.kubernetes.store import Change, Key

_ENDED = ("Succeeded", "Failed")
AccountFiles = Callable[[str, str], Mapping[str, str]]


class PodRun:
    """A pod that runs. `number` is the last one of its address."""

    def __init__(self, kubelet: Kubelet, pod: Object, number: int) -> None:
        self._kubelet = kubelet
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.key: Key = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self.number = number
        self.address = f"127.{kubelet.subnet}.{number}"
        account = kubelet.account_files(self.key[0], pod["spec"]["serviceAccountName"])
        self.files = PodFiles(
            kubelet.store, kubelet.folder / str(next(kubelet.numbers)), kubelet.folder / "claims",
            self.address, account,
        )  # fmt: skip
        self.containers, self.first = (
            [self._container(spec) for spec in pod["spec"].get(field) or ()]
            for field in ("containers", "initContainers")
        )
        self._status: Object = {"phase": "Pending", "startTime": kubelet.objects.now()}
        self._initialized = False
        self._failed: Object = {}
        self.stopping = asyncio.Event()

    def _container(self, spec: Object) -> Container:
        now = self._kubelet.objects.now
        return Container(self._kubelet.terms, self.files, spec, self.address, self.publish, now)

    async def run(self) -> None:
        """Run until all containers have ended, or the pod is deleted."""
        try:
            await self._run_containers()
            codes = [container.exit_code for container in self.containers]
            if self._failed or None not in codes:
                self._status["phase"] = "Failed" if self._failed or any(codes) else "Succeeded"
                self._status |= self._failed
            self.publish()
            while "deletionTimestamp" not in self.pod["metadata"] and not self._gone:
                self.stopping.clear()
                await self.stopping.wait()
        finally:
            self._kubelet.remove(self)

    @property
    def _gone(self) -> bool:
        """Whether the object of the pod does not exist any more."""
        pod = self._kubelet.store.get("pods", self.key)
        return pod is None or pod["metadata"]["uid"] != self.uid

    async def _run_containers(self) -> None:
        while not self.stopping.is_set():
            self.publish()
            try:
                self.files.write_volumes(self.pod)
                break
            except LaunchError:
                await wait_at_most(self.stopping.wait(), RETRY_S)
        policy = self.pod["spec"]["restartPolicy"]
        for container in self.first:
            again = "Never" if policy == "Never" else "OnFailure"
            await container.run(lambda: self.pod, again, self.stopping)
            if container.exit_code != 0:
                return
        self._initialized = True
        async with BackgroundTasks() as tasks:
            for container in self.containers:
                tasks.start(container.run(lambda: self.pod, policy, self.stopping), "container")
            await tasks.join()

    def update(self, pod: Object) -> None:
        """Follow a change of the pod, or of what it mounts."""
        self.pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            self.stopping.set()
        else:
            with suppress(LaunchError):
                self.files.write_volumes(pod)

    def evict(self, message: str) -> None:
        """Fail the pod, as a node does that is out of memory or disk."""
        self._failed = {"reason": "Evicted", "message": message}
        self.stopping.set()

    def kill(self) -> None:
        """Kill all processes for good."""
        self.stopping.set()
        for container in (*self.first, *self.containers):
            container.kill()

    def publish(self) -> None:
        """Write the pod's status, unless its node is lost."""
        kubelet = self._kubelet
        pod = kubelet.store.get("pods", self.key)
        if pod is None or pod["metadata"]["uid"] != self.uid or self.node in kubelet.lost:
            return
        if self._status["phase"] == "Pending" and any(c.process for c in self.containers):
            self._status["phase"] = "Running"
        ended = self._status["phase"] in _ENDED
        ready = not ended and all(container.ready for container in self.containers)
        known = {c["type"]: c for c in pod["status"].get("conditions") or ()}
        for name, holds in (
            ("Initialized", self._initialized), ("ContainersReady", ready), ("Ready", ready),
        ):  # fmt: skip
            status = "True" if holds else "False"
            if known.get(name, {}).get("status") != status:
                time = kubelet.objects.now()
                known[name] = {"type": name, "status": status, "lastTransitionTime": time}
        address = f"10.{kubelet.subnet}.{self.number}"
        status = pod["status"] | self._status | {
            "podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1",
            "conditions": list(known.values()),
            "containerStatuses": [container.status for container in self.containers],
        }  # fmt: skip
        if self.first:
            status["initContainerStatuses"] = [container.status for container in self.first]
        kubelet.put_status("pods", pod, status)


class Kubelet(Controller):
    """Runs the pods of all nodes as processes. `subnet` has the two middle numbers of the pods'
    addresses, which are 10.x.y.z in the API and 127.x.y.z for processes."""

    kinds = ("pods", "configmaps", "secrets")

    def __init__(
        self, objects: ClusterObjects, folder: Path, subnet: str, terms: Terms,
        account_files: AccountFiles,
    ) -> None:  # fmt: skip
        self.folder, self.subnet, self.terms = folder, subnet, terms
        self.account_files = account_files
        self.numbers = count(1)
        self.runs: dict[Key, PodRun] = {}
        self.lost: set[str] = set()
        """Nodes that do not answer any more."""
        self._free = list(range(250, 0, -1))
        self._tasks = BackgroundTasks()
        super().__init__(objects)

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        metadata = change.after["metadata"]
        if change.kind == "pods":
            return ((metadata["namespace"], metadata["name"]),)
        return tuple(key for key in self.runs if key[0] == metadata["namespace"])

    def reconcile(self, key: Any) -> None:
        pod, run = self.store.get("pods", key), self.runs.get(key)
        if run is not None and (pod is None or pod["metadata"]["uid"] != run.uid):
            run.kill()
        elif run is not None and pod is not None:
            run.update(pod)
        elif pod is not None and pod["spec"].get("nodeName") not in (None, "", *self.lost):
            if "deletionTimestamp" in pod["metadata"]:
                self.objects.delete(self.target("pods", pod), {"gracePeriodSeconds": 0})
            elif pod["status"].get("phase") not in _ENDED and self._free:
                run = self.runs[key] = PodRun(self, pod, self._free.pop())
                self._tasks.start(run.run(), f"pod {key[1]}")

    def remove(self, run: PodRun) -> None:
        """Forget a pod that has ended, and look again for one of its name."""
        del self.runs[run.key]
        self._free.insert(0, run.number)
        run.files.remove()
        self.mark((run.key,))

    def run_of(self, name: str, namespace: str = "default") -> PodRun:
        """Return a pod that runs."""
        return self.runs[namespace, name]

    async def lose_node(self, name: str) -> None:
        """Take a node away with all that runs there, as when its host fails. Its pods are deleted,
        and stay as terminating ones."""
        self.lost.add(name)
        node = self.objects.read(self.objects.target("nodes", "", name))
        lost = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
        self.put_status("nodes", node, node["status"] | {"conditions": [lost]})
        for run in [run for run in self.runs.values() if run.node == name]:
            run.kill()
        for pod in self.store.items("pods"):
            if pod["spec"].get("nodeName") == name:
                others = [c for c in pod["status"]["conditions"] if c["type"] != "Ready"]
                ready = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
                status = pod["status"] | {"conditions": [*others, ready]}
                self.put_status("pods", pod, status)
                self.objects.delete(self.target("pods", pod), {})

    def read_log(self, key: Key, query: Mapping[str, str]) -> bytes:
        """Return the output of a container. Raises `ApiFailure` 400."""
        run = self.runs.get(key)
        containers = [*run.containers, *run.first] if run else []
        for container in containers:
            if query.get("container") in (None, "", container.name):
                restarts = container.restarts - (query.get("previous") == "true")
                path = container.log(restarts)
                if not path.exists():  # not started again yet: the last output
                    path = container.log(restarts - 1)
                return path.read_bytes() if path.exists() else b""
        raise ApiFailure(400, f"container {query.get('container')!r} of {key[1]} is not running")

    async def close(self) -> None:
        """Kill all pods."""
        for run in tuple(self.runs.values()):
            run.kill()
        await self._tasks.close()
