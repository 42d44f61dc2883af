"""The discovery suite over a real etcd server."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.conformance.planes import join_discovery
from tests.support.servers import EtcdProcess

from dynamo_conformance.discovery import DiscoveryConformance, JoinDiscovery

_roots = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with EtcdProcess() as server:
        yield server


class TestEtcd(DiscoveryConformance):
    @pytest.fixture
    async def join(self, etcd: EtcdProcess) -> AsyncIterator[JoinDiscovery]:
        async for join in join_discovery(f"{etcd.url}/test-{next(_roots)}"):
            yield join
