"""Generators for the `join` fixtures: each call of `join` opens a plane, closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import Events, open_events
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.requests import Requests, open_requests
from dynamo.communication.transfer import TransferPlane, open_transfer
from dynamo_conformance.discovery import JoinDiscovery as JoinDiscovery
from dynamo_conformance.events import JoinEvents as JoinEvents
from dynamo_conformance.requests import JoinRequests as JoinRequests
from dynamo_conformance.transfer import JoinTransfer as JoinTransfer


async def join_discovery(url: str) -> AsyncIterator[JoinDiscovery]:
    async with AsyncExitStack() as stack:

        async def join() -> Discovery:
            plane = await open_discovery(url)
            stack.push_async_callback(plane.close)
            return plane

        yield join


async def join_requests(
    url: str, options: PlaneOptions = DEFAULT_OPTIONS
) -> AsyncIterator[JoinRequests]:
    async with AsyncExitStack() as stack:

        async def join() -> Requests:
            plane = await open_requests(url, options)
            stack.push_async_callback(plane.close)
            return plane

        yield join


async def join_events(
    url: str, directory_name: str, options: PlaneOptions = DEFAULT_OPTIONS
) -> AsyncIterator[JoinEvents]:
    """Yield a `join` whose planes share the memory discovery of that name."""
    async with AsyncExitStack() as stack:

        async def join() -> Events:
            directory = await open_discovery(f"memory:{directory_name}")
            stack.push_async_callback(directory.close)
            plane = await open_events(url, directory, options)
            stack.push_async_callback(plane.close)
            return plane

        yield join


async def join_transfer(
    url: str, options: PlaneOptions = DEFAULT_OPTIONS
) -> AsyncIterator[JoinTransfer]:
    async with AsyncExitStack() as stack:

        async def join() -> TransferPlane:
            plane = await open_transfer(url, options)
            stack.push_async_callback(plane.close)
            return plane

        yield join
