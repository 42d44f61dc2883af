"""The discovery suite over the API server of a test cluster, or over a real one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.control_plane import TOKEN
from tests.support.kubernetes import GraphPods, KubernetesClient, account_environment

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo_conformance.discovery import DiscoveryConformance, JoinDiscovery

_namespaces = itertools.count()


class TestKubernetes(DiscoveryConformance):
    @pytest.fixture
    async def join(
        self,
        api_server: tuple[str, bytes],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> AsyncIterator[JoinDiscovery]:
        url, ca = api_server
        async with AsyncExitStack() as stack:
            client = KubernetesClient(url, TOKEN, ca)
            stack.callback(client.close)
            pods = GraphPods(client, f"lab-{next(_namespaces)}")
            await pods.create()
            account = account_environment(url, TOKEN, tmp_path / "account", ca)
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
