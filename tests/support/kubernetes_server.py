"""A test cluster beside blocking tests: in a thread, with pods that have no kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.support.kubernetes import GraphPods, KubernetesClient, account_environment

from dynamo.runtime.background import ThreadBackground
from dynamo.testing.kubernetes.cluster import Cluster

T = TypeVar("T")


class KubernetesServer:
    """A cluster on a thread of its own, used with `with`. `pods` are those of one graph."""

    def __init__(self, folder: Path, namespace: str = "lab") -> None:
        self._folder = folder
        self._namespace = namespace

    def __enter__(self) -> Self:
        self._background = ThreadBackground("test-cluster")
        self.run(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop)
        asyncio.run(self._background.close())

    def run(self, work: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
        """Run a coroutine in the cluster's thread. Blocks."""

        async def call() -> T:
            return await work(*arguments, **options)

        return self._background.submit(call()).result(60)

    def start_pod(self, name: str, *, ready: bool = True) -> dict[str, str]:
        """Create a pod and return the environment of its processes."""
        uid = self.run(self.pods.add, name, ready=ready)
        return self.account | self.pods.environment(name, uid)

    async def _start(self) -> None:
        self.cluster = await Cluster().__aenter__()
        self.client = KubernetesClient(self.cluster.server.url)
        self.pods = GraphPods(self.client, self._namespace)
        await self.pods.create()
        folder = self._folder / "account"
        self.account = account_environment(self.cluster.server.url, "admintoken", folder)

    async def _stop(self) -> None:
        self.client.close()
        await self.cluster.__aexit__(None, None, None)
