"""The event and request suites over a real NATS server, on asyncio and uvloop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.conformance.planes import join_events, join_requests
from tests.support.servers import NatsProcess

from dynamo_conformance.events import EventsConformance
from dynamo_conformance.events import JoinEvents as JoinEvents
from dynamo_conformance.requests import JoinRequests as JoinRequests
from dynamo_conformance.requests import RequestsConformance


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsProcess]:
    with NatsProcess() as server:
        yield server


class TestEvents(EventsConformance):
    @pytest.fixture
    async def join(
        self, nats: NatsProcess, request: pytest.FixtureRequest
    ) -> AsyncIterator[JoinEvents]:
        async for join in join_events(nats.url, f"nats-{request.node.name}"):
            yield join


class TestEventsUvloop(EventsConformance):
    @pytest.fixture
    async def join(
        self, nats: NatsProcess, request: pytest.FixtureRequest
    ) -> AsyncIterator[JoinEvents]:
        async for join in join_events(nats.url, f"nats-uvloop-{request.node.name}"):
            yield join


class TestRequests(RequestsConformance):
    connections = 2  # through NATS, and directly while NATS does not answer

    @pytest.fixture
    async def join(self, nats: NatsProcess) -> AsyncIterator[JoinRequests]:
        async for join in join_requests(nats.url):
            yield join


class TestRequestsUvloop(RequestsConformance):
    connections = 2

    @pytest.fixture
    async def join(self, nats: NatsProcess) -> AsyncIterator[JoinRequests]:
        async for join in join_requests(nats.url):
            yield join
