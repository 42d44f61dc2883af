"""The event suite over every backend, and over both loops."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.conformance.members import events

from dynamo.testing.conformance.events import EventsConformance, JoinEvents


class TestMemory(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[JoinEvents]:
        async for join in events(f"memory:{request.node.name}", "events"):
            yield join


class TestTcp(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[JoinEvents]:
        async for join in events("tcp://127.0.0.1:0", request.node.name):
            yield join


class TestTcpUvloop(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[JoinEvents]:
        async for join in events("tcp://127.0.0.1:0", request.node.name):
            yield join
