"""The `join` of a suite: every call opens one more member of a plane; all are closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import Events, open_events
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.requests import Requests, open_requests
from dynamo.testing.conformance.discovery import JoinDiscovery as JoinDiscovery
from dynamo.testing.conformance.events import JoinEvents as JoinEvents
from dynamo.testing.conformance.requests import JoinRequests as JoinRequests


async def discoveries(url: str) -> AsyncIterator[JoinDiscovery]:
    async with AsyncExitStack() as held:

        async def join() -> Discovery:
            plane = await open_discovery(url)
            held.push_async_callback(plane.close)
            return plane

        yield join


async def requests(
    url: str, options: PlaneOptions = DEFAULT_OPTIONS
) -> AsyncIterator[JoinRequests]:
    async with AsyncExitStack() as held:

        async def join() -> Requests:
            plane = await open_requests(url, options)
            held.push_async_callback(plane.close)
            return plane

        yield join


async def events(
    url: str, place: str, options: PlaneOptions = DEFAULT_OPTIONS
) -> AsyncIterator[JoinEvents]:
    """`place`: the memory discovery that they share."""
    async with AsyncExitStack() as held:

        async def join() -> Events:
            directory = await open_discovery(f"memory:{place}")
            held.push_async_callback(directory.close)
            plane = await open_events(url, directory, options)
            held.push_async_callback(plane.close)
            return plane

        yield join
