"""The discovery suite over a real etcd, and what only a server can do to its clients."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.conformance.members import discoveries

from dynamo.testing.conformance.discovery import DiscoveryConformance, JoinDiscovery
from dynamo.testing.servers import EtcdProcess

_roots = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with EtcdProcess() as server:
        yield server


class TestEtcd(DiscoveryConformance):
    @pytest.fixture
    async def join(self, etcd: EtcdProcess) -> AsyncIterator[JoinDiscovery]:
        async for join in discoveries(f"{etcd.url}/test-{next(_roots)}"):
            yield join
