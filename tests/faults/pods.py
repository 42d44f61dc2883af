"""Faults of a Kubernetes API server: a pod of workers and a pod of frontends, whose discovery it
is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

from tests.faults.cluster import Cluster
from tests.faults.fault import Fault
from tests.faults.stream_client import Answer, body_of, read
from tests.support.kubernetes_server import KubernetesServer

from dynamo.communication.discovery import open_discovery
from dynamo.runtime.deployment import Deployment, ProcessRecord

IN_STEP_S = 2.0
"""Views agree with the live workers so soon after the server is back."""


class PodCluster(Cluster):
    """A deployment whose workers and frontends are the processes of two pods."""

    kubernetes: KubernetesServer

    def __enter__(self) -> Self:
        self._pods = ExitStack()
        self.kubernetes = self._pods.enter_context(KubernetesServer(self.folder))
        flags = self._command[self._command.index("run") + 1 :]
        at = flags.index("--http-workers")
        frontend = ["--workers", "0", *flags[at : at + 2], "--http-port", str(self.port)]
        workers = ["in=none", *flags[:at], *flags[flags.index("--model-name") :]]
        self._processes = [self._start("workers", workers), self._start("frontend", frontend)]
        try:
            self.wait_blocking(self.all_ready, 40)
            self.wait_blocking(lambda: len(self.ready("frontend")) == self._frontends, 40)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end()
        assert kind or "Traceback" not in self.log, self.log[self.log.index("Traceback") :][:3000]

    def processes(self, role: str) -> list[ProcessRecord]:
        """Return the live processes of a role, of both pods."""
        folders = self.folder.glob("*/dynamo/*/")
        records = [r for f in folders for r in Deployment(f.name, f).live_processes()]
        return [record for record in records if record.role == role]

    def known_workers(self) -> int:
        """Return the number of workers that the frontend knows."""
        page = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
        with page:
            return sum(json.load(page)["workers"].values())

    async def listed_workers(self) -> dict[str, int]:
        """Return the pids of the workers that discovery lists, by key."""
        url = f"kubernetes://{self.kubernetes.pods.namespace}/qwen"
        with patch.dict(os.environ, self.kubernetes.account):
            plane = await open_discovery(url)
        try:
            records = await plane.get("/_processes/worker/")
        finally:
            await plane.close()
        return {key: json.loads(record)["pid"] for key, record in records.items()}

    def _start(self, pod: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        home = self.folder / pod
        home.mkdir(mode=0o700)
        environ = os.environ | {"XDG_RUNTIME_DIR": str(home)} | self.kubernetes.start_pod(pod)
        command = [sys.executable, "-P", "-m", "dynamo", "run", *arguments]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=self.folder)

    def _end(self) -> None:
        for process in reversed(self._processes):
            self._process = process
            self._stop()
        self._pods.close()


Injure = Callable[[PodCluster], Awaitable[Any]]


def away(seconds: float, streams: int, tokens: int) -> Callable[[Cluster], Awaitable[str]]:
    """Return a fault: the API server is away while workers are killed and started."""

    async def run(cluster: Cluster) -> str:
        assert isinstance(cluster, PodCluster)
        server = cluster.kubernetes.cluster.server
        return await _outage(cluster, server.stop, server.start, seconds, streams, tokens)

    return run


async def frozen(cluster: Cluster) -> str:
    """Let the API server answer nothing, and go on."""
    assert isinstance(cluster, PodCluster)
    faults = cluster.kubernetes.cluster.server.faults

    async def freeze() -> None:
        faults.hanging.clear()
        cluster.kubernetes.cluster.server.cut_watches()

    async def thaw() -> None:
        faults.hanging.set()

    return await _outage(cluster, freeze, thaw, 8.0, 24, 300)


async def restored(cluster: Cluster) -> str:
    """Start the API server again with what it had before the workers were killed."""
    assert isinstance(cluster, PodCluster)
    server = cluster.kubernetes.cluster.server
    backup = server.store.backup()
    cluster.kill("worker")
    await cluster.wait_for(lambda: len(cluster.ready("worker")) == cluster.workers["worker"])
    await _until_in_step(cluster)
    return await _outage(cluster, server.stop, lambda: server.restore(backup), 3.0, 24, 150)


async def forgotten(cluster: Cluster) -> str:
    """Cut the watches, and let the API server forget its history each time."""
    assert isinstance(cluster, PodCluster)
    server = cluster.kubernetes.cluster.server

    async def forget() -> None:
        for _ in range(8):
            server.cut_watches()
            server.compact()
            await asyncio.sleep(0.5)

    async def nothing() -> None:
        return

    return await _outage(cluster, forget, nothing, 1.0, 24, 300)


async def refused(cluster: Cluster) -> str:
    """Let the API server answer 429, 500 and 401 in turn, with new tokens at last."""
    assert isinstance(cluster, PodCluster)
    server, folder = cluster.kubernetes.cluster.server, cluster.folder / "account"

    async def refuse() -> None:
        server.cut_watches()
        for server.faults.code in (429, 500):
            await asyncio.sleep(2.0)
        server.faults.code = 0
        server.access.tokens["later"] = server.access.tokens.pop("admintoken")

    async def rotate() -> None:
        (folder / "token").write_text("later")

    return await _outage(cluster, refuse, rotate, 2.0, 24, 300)


async def _outage(
    cluster: PodCluster,
    begin: Callable[[], Awaitable[Any]],
    end: Callable[[], Awaitable[Any]],
    seconds: float,
    streams: int,
    tokens: int,
) -> str:
    """Begin an outage under streams, kill two workers in it, end it, and wait for views that agree
    with the workers that live."""

    async def in_thread(work: Callable[[], Awaitable[Any]]) -> None:
        await asyncio.to_thread(cluster.kubernetes.run, work)

    took: list[float] = []
    new: list[Answer] = []

    async def inject() -> None:
        await in_thread(begin)
        for _ in range(2):
            await asyncio.sleep(seconds / 4)
            cluster.kill("worker")
        new.extend(await cluster.ask_all(range(24), 20))
        await asyncio.sleep(seconds / 2)
        await in_thread(end)
        took.append(await _until_in_step(cluster))
        await cluster.wait_for(lambda: len(cluster.ready("worker")) == cluster.workers["worker"])

    answers = [Answer(key) for key in range(streams)]
    async with asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(read(cluster.port, answer, body_of(answer.key, tokens, 8), 300.0))
        for answer in answers:
            await answer.begun.wait()
        await inject()
    new += await cluster.ask_all(range(24), 20)
    failed = [answer for answer in (*answers, *new) if not answer.complete]
    assert not failed, (failed[:2], cluster.log[-3000:])
    assert took[0] <= IN_STEP_S, f"in step after {took[0]:.1f} s"
    return (
        f"{len(answers)} streams and {len(new)} new ones, 0 failed; views list exactly the live "
        f"workers {took[0]:.1f} s after its end"
    )


async def _until_in_step(cluster: PodCluster) -> float:
    """Return the seconds until discovery and the frontend know exactly the live workers."""
    began = time.monotonic()
    while True:
        pids = sorted(record.pid for record in cluster.processes("worker"))
        listed, known = await cluster.listed_workers(), cluster.known_workers()
        if sorted(listed.values()) == pids and known == len(pids):
            return time.monotonic() - began
        assert time.monotonic() - began < 20, (pids, listed, known, cluster.log[-3000:])
        await asyncio.sleep(0.05)


PODS = (
    Fault("the API server is away for 60 s, workers are killed and started meanwhile", "requests continue; in step within 2 s of its return", away(60.0, 160, 3000), planes=("pods",), workers=6),
    Fault("the API server is away for 6 s, workers are killed and started meanwhile", "requests continue; in step within 2 s of its return", away(6.0, 24, 300), planes=("pods",), workers=4),
    Fault("the API server hangs for 8 s, workers are killed and started meanwhile", "requests continue; in step within 2 s of its end", frozen, planes=("pods",), workers=4),
    Fault("the API server comes back with an older backup", "requests continue; in step within 2 s of its return", restored, planes=("pods",), workers=4),
    Fault("the API server cuts watches and forgets their history (410)", "requests continue; in step within 2 s", forgotten, planes=("pods",), workers=4),
    Fault("the API server answers 429, 500, and 401 until tokens are replaced", "requests continue; in step within 2 s of the new token", refused, planes=("pods",), workers=4),
)  # fmt: skip
