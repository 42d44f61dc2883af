"""The discovery suite over the API server of a cluster."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.kubernetes import GraphPods, KubernetesClient, account_environment

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.testing.kubernetes.cluster import Cluster
from dynamo_conformance.discovery import DiscoveryConformance, JoinDiscovery


class TestKubernetes(DiscoveryConformance):
    @pytest.fixture
    async def join(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[JoinDiscovery]:
        async with Cluster() as cluster, AsyncExitStack() as stack:
            client = KubernetesClient(cluster.server.url)
            stack.callback(client.close)
            pods = GraphPods(client, "lab")
            await pods.create()
            account = account_environment(cluster.server.url, "admintoken", tmp_path / "account")
            names = (f"pod-{number}" for number in itertools.count())

            async def join() -> Discovery:
                name = next(names)
                environment = account | pods.environment(name, await pods.add(name))
                for variable, value in environment.items():
                    monkeypatch.setenv(variable, value)
                plane = await open_discovery("kubernetes:")
                stack.push_async_callback(plane.close)
                return plane

            yield join
