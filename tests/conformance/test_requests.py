"""The request suite over every backend without a server, on asyncio and uvloop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.conformance.planes import join_requests

from dynamo_conformance.requests import JoinRequests, RequestsConformance


class TestMemory(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in join_requests("memory:"):
            yield join


class TestTcp(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in join_requests("tcp://127.0.0.1:0"):
            yield join


class TestTcpUvloop(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in join_requests("tcp://127.0.0.1:0"):
            yield join
