"""The discovery suite over the API server of a test cluster, or over a real one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.control_plane import ASSETS, TOKEN, ControlPlane
from tests.support.kubernetes import GraphPods, KubernetesClient, account_environment

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.testing.kubernetes.cluster import Cluster
from dynamo_conformance.discovery import DiscoveryConformance, JoinDiscovery

_namespaces = itertools.count()


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane | None]:
    """A real API server if its binaries are there."""
    if not ASSETS:
        yield None
        return
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


class TestKubernetes(DiscoveryConformance):
    @pytest.fixture
    async def join(
        self,
        control_plane: ControlPlane | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> AsyncIterator[JoinDiscovery]:
        async with AsyncExitStack() as stack:
            if control_plane is None:
                url, ca = (await stack.enter_async_context(Cluster())).server.url, b""
            else:
                url, ca = control_plane.url, control_plane.ca
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
