"""The event suite over every backend without a server, on asyncio and uvloop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.conformance.planes import join_events

from dynamo_conformance.events import EventsConformance, JoinEvents


class TestMemory(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[JoinEvents]:
        async for join in join_events(f"memory:{request.node.name}", "events"):
            yield join


class TestTcp(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[JoinEvents]:
        async for join in join_events("tcp://127.0.0.1:0", request.node.name):
            yield join


class TestTcpUvloop(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[JoinEvents]:
        async for join in join_events("tcp://127.0.0.1:0", request.node.name):
            yield join
