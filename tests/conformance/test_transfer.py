"""The transfer suite over every backend, on asyncio and uvloop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.conformance.planes import join_transfer

from dynamo.communication.options import PlaneOptions
from dynamo_conformance.transfer import JoinTransfer, TransferConformance

SECRET = PlaneOptions(secret="0123456789abcdef-secret")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull has one second and more to end. A loaded machine stops a test for longer."""
    monkeypatch.setattr("dynamo.communication.transfer.backend.MIN_TIMEOUT_S", 20.0)


class TestMemory(TransferConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("memory:?gbps=20&latency_ms=0.2"):
            yield join


class TestShm(TransferConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("shm:"):
            yield join


class TestTcp(TransferConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("tcp:"):
            yield join


class TestShmSecretUvloop(TransferConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("shm:", SECRET):
            yield join


class TestTcpSecretUvloop(TransferConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("tcp:", SECRET):
            yield join


class TestAuto(TransferConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("auto:"):
            yield join


class TestNixl(TransferConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinTransfer]:
        async for join in join_transfer("nixl:", SECRET):
            yield join
