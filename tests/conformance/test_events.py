"""The event suite over every backend, and over both loops."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import Events, open_events
from dynamo.testing.conformance.events import EventsConformance, Join


async def members(url: str, place: str) -> AsyncIterator[Join]:
    opened: list[tuple[Events, Discovery]] = []

    async def join() -> Events:
        directory = await open_discovery(f"memory:{place}")
        opened.append((await open_events(url, directory), directory))
        return opened[-1][0]

    yield join
    for plane, directory in opened:
        await plane.close()
        await directory.close()


class TestMemory(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[Join]:
        async for join in members(f"memory:{request.node.name}", "events"):
            yield join


class TestTcp(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[Join]:
        async for join in members("tcp://127.0.0.1:0", request.node.name):
            yield join


class TestTcpUvloop(EventsConformance):
    @pytest.fixture
    async def join(self, request: pytest.FixtureRequest) -> AsyncIterator[Join]:
        async for join in members("tcp://127.0.0.1:0", request.node.name):
            yield join
