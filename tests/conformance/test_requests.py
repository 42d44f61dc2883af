"""The request suite over every backend, and over both loops."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dynamo.communication.requests import Requests, open_requests
from dynamo.testing.conformance.requests import Join, RequestsConformance


async def members(url: str) -> AsyncIterator[Join]:
    opened: list[Requests] = []

    async def join() -> Requests:
        opened.append(await open_requests(url))
        return opened[-1]

    yield join
    for one in opened:
        await one.close()


class TestMemory(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[Join]:
        async for join in members("memory:"):
            yield join


class TestTcp(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[Join]:
        async for join in members("tcp://127.0.0.1:0"):
            yield join


class TestTcpUvloop(RequestsConformance):
    @pytest.fixture
    async def join(self) -> AsyncIterator[Join]:
        async for join in members("tcp://127.0.0.1:0"):
            yield join
