"""The discovery suite over a real etcd, and what only a server can do to its clients."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.testing.conformance.discovery import DiscoveryConformance, Join
from dynamo.testing.servers import EtcdProcess

_roots = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with EtcdProcess() as server:
        yield server


class TestEtcd(DiscoveryConformance):
    @pytest.fixture
    async def join(self, etcd: EtcdProcess) -> AsyncIterator[Join]:
        url = f"{etcd.url}/test-{next(_roots)}"
        opened: list[Discovery] = []

        async def join() -> Discovery:
            opened.append(await open_discovery(url))
            return opened[-1]

        yield join
        for one in opened:
            await one.close()
