"""Handlers and sinks of the conformance tests of request backends."""
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dynamo.communication.requests import Requests, ResponseWriter
from dynamo.core.context import Context
from dynamo.core.tasks import BackgroundTasks

JoinRequests = Callable[[], Awaitable[Requests]]
CALL_CONTEXT = Context("request-1", attempt=2, timeout_s=9.0, metadata={"k": "v"})


class CollectingSink:
    """A sink that keeps its items and returns False at `item_limit` of them."""

    def __init__(self, item_limit: int | None = None) -> None:
        self.items: list[bytes] = []
        self.first_item = asyncio.Event()
        self._item_limit = item_limit

    def __call__(self, payload: bytes) -> bool:
        self.items.append(payload)
        self.first_item.set()
        return len(self.items) != self._item_limit


async def echo_handler(payload: bytes, writer: ResponseWriter) -> None:
    """Answer with the payload of the call."""
    writer.send(payload)


class EndlessHandler:
    """A handler that sends one item and waits to be cancelled."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, payload: bytes, writer: ResponseWriter) -> None:
        writer.send(b"first")
        self.running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def join_pair(
    join: JoinRequests, handler: Callable[[bytes, ResponseWriter], Awaitable[None]]
) -> tuple[Requests, Requests]:
    """Open a server that serves `handler` as endpoint "e", and a client."""
    server = await join()
    await server.serve("e", handler)
    return server, await join()


@asynccontextmanager
async def open_endless_call(
    join: JoinRequests,
) -> AsyncIterator[tuple[Requests, Requests, EndlessHandler, CollectingSink, asyncio.Task[None]]]:
    """Yield server, client, handler, sink and task of a call whose first item has arrived."""
    handler, sink = EndlessHandler(), CollectingSink()
    server, client = await join_pair(join, handler)
    async with BackgroundTasks() as tasks:
        call = tasks.start(client.call(server.address, "e", b"", CALL_CONTEXT, sink))
        await sink.first_item.wait()
        yield server, client, handler, sink, call
