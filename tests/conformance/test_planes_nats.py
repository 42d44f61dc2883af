"""The event and request suites over a real NATS, over both loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import Events, open_events
from dynamo.communication.requests import Requests, open_requests
from dynamo.testing.conformance.events import EventsConformance
from dynamo.testing.conformance.events import Join as JoinEvents
from dynamo.testing.conformance.requests import Join as JoinRequests
from dynamo.testing.conformance.requests import RequestsConformance
from dynamo.testing.servers import NatsProcess


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsProcess]:
    with NatsProcess() as server:
        yield server


async def events(url: str, place: str) -> AsyncIterator[JoinEvents]:
    opened: list[tuple[Events, Discovery]] = []

    async def join() -> Events:
        directory = await open_discovery(f"memory:{place}")
        opened.append((await open_events(url, directory), directory))
        return opened[-1][0]

    yield join
    for plane, directory in opened:
        await plane.close()
        await directory.close()


async def requests(url: str) -> AsyncIterator[JoinRequests]:
    opened: list[Requests] = []

    async def join() -> Requests:
        opened.append(await open_requests(url))
        return opened[-1]

    yield join
    for one in opened:
        await one.close()


class TestEvents(EventsConformance):
    @pytest.fixture
    async def join(
        self, nats: NatsProcess, request: pytest.FixtureRequest
    ) -> AsyncIterator[JoinEvents]:
        async for join in events(nats.url, f"nats-{request.node.name}"):
            yield join


class TestEventsUvloop(EventsConformance):
    @pytest.fixture
    async def join(
        self, nats: NatsProcess, request: pytest.FixtureRequest
    ) -> AsyncIterator[JoinEvents]:
        async for join in events(nats.url, f"nats-uvloop-{request.node.name}"):
            yield join


class TestRequests(RequestsConformance):
    @pytest.fixture
    async def join(self, nats: NatsProcess) -> AsyncIterator[JoinRequests]:
        async for join in requests(nats.url):
            yield join


class TestRequestsUvloop(RequestsConformance):
    @pytest.fixture
    async def join(self, nats: NatsProcess) -> AsyncIterator[JoinRequests]:
        async for join in requests(nats.url):
            yield join
