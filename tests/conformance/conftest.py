"""uvloop for test classes named `...Uvloop`, and the API server of tests of Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop
from tests.support.control_plane import ASSETS, ControlPlane

from dynamo.testing.kubernetes.cluster import Cluster

Factories = dict[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Factories:
    owner = item.getparent(pytest.Class)
    if owner is not None and owner.name.endswith("Uvloop"):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane | None]:
    """A real API server if its binaries are there."""
    if not ASSETS:
        yield None
        return
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture
async def api_server(control_plane: ControlPlane | None) -> AsyncIterator[tuple[str, bytes]]:
    """URL and certificate authority of the real API server, else of a test cluster."""
    if control_plane is not None:
        yield control_plane.url, control_plane.ca
        return
    async with Cluster() as cluster:
        yield cluster.server.url, b""
