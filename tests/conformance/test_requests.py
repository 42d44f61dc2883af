"""The request suite over every backend, and over both loops."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.conformance.members import requests

from dynamo.testing.conformance.requests import JoinRequests, RequestsConformance


class TestMemory(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in requests("memory:"):
            yield join


class TestTcp(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in requests("tcp://127.0.0.1:0"):
            yield join


class TestTcpUvloop(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[JoinRequests]:
        async for join in requests("tcp://127.0.0.1:0"):
            yield join
