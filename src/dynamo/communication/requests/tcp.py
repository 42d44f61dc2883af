"""The request plane in own frames, one connection per (process, address); over TCP unless told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Self

from dynamo.communication.link import Flusher, Link, close_links
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.requests.accepted import Accepted
from dynamo.communication.requests.dialled import Dialled
from dynamo.communication.requests.endpoints import Endpoints
from dynamo.communication.requests.plane import Handler, Requests, Sink, Window
from dynamo.communication.wires import TcpWires, Wires
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone, ProtocolError, WorkerFailed
from dynamo.core.tasks import Tasks
from dynamo.telemetry.logs import request_id

log = logging.getLogger(__name__)


class TcpRequests(Requests):
    """`tcp://HOST:PORT`; port 0 is any. Planes over other wires may share its `endpoints`."""

    def __init__(self, wires: Wires, endpoints: Endpoints | None = None) -> None:
        self._wires = wires
        self._opening = asyncio.Lock()
        self._flusher = Flusher()
        self._endpoints = Endpoints() if endpoints is None else endpoints
        self._endpoints.on_empty.append(self._go_away)
        self._accepted: set[Accepted] = set()
        self._dialled: dict[str, Dialled] = {}
        self._open: set[Dialled] = set()
        self._dials: dict[str, asyncio.Task[Dialled | DynamoError]] = {}
        self._tasks = Tasks()
        self._broken: list[Callable[[str], None]] = []
        self._closed = False

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """Nothing listens before the first `serve`. Raises `ConfigError`."""
        return cls(await TcpWires.open(url, options))

    @property
    def address(self) -> str:
        return self._wires.address

    async def serve(self, endpoint: str, handler: Handler) -> None:
        self._endpoints.serve(endpoint, handler)
        await self.listen()

    async def listen(self) -> None:
        """Take connections, for what is served now and later."""
        async with self._opening:
            if not self._wires.listening:
                await self._wires.listen(self._accept)

    async def withdraw(self, endpoint: str, drain_s: float | None = 0.0) -> None:
        await self._endpoints.withdraw(endpoint, drain_s)

    async def reach(self, address: str) -> None:
        """Connect to an instance unless that is done; `on_broken` tells if it cannot be."""
        with suppress(InstanceGone):
            await self._connect(address)

    def _go_away(self) -> None:
        """Tell callers to open no more streams here."""
        for peer in self._accepted:
            peer.go_away()

    def call(
        self,
        address: str,
        endpoint: str,
        payload: bytes,
        context: Context,
        sink: Sink,
        *,
        window: Window | None = None,
    ) -> Coroutine[Any, Any, None]:
        peer = self._dialled.get(address)
        if peer is None or peer.calls.spent:
            return self._connect_and_call(address, endpoint, payload, context, sink, window)
        return peer.calls.call(endpoint, payload, context, sink, window)

    async def _connect_and_call(
        self,
        address: str,
        endpoint: str,
        payload: bytes,
        context: Context,
        sink: Sink,
        window: Window | None,
    ) -> None:
        peer = await self._connect(address)
        await peer.calls.call(endpoint, payload, context, sink, window)

    def heard(self, address: str) -> int:
        peer = self._dialled.get(address)
        return 0 if peer is None else peer.calls.frames

    def break_off(self, address: str) -> None:
        peer = self._dialled.get(address)
        if peer is not None:
            peer.link.abort()

    def on_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self._broken.append(callback)
        return lambda: self._broken.remove(callback)

    async def close(self) -> None:
        self._closed = True
        self._wires.stop()
        await self._endpoints.close()
        await self._tasks.close()
        for peer in self._open:
            peer.calls.fail(WorkerFailed("this process closed its request plane"))
        await close_links(self._links())

    def abort(self) -> None:
        """Break every connection at once, as a crash would."""
        self._wires.stop()
        for link in self._links():
            link.abort()

    def _links(self) -> list[Link]:
        return [peer.link for peer in self._open] + [peer.link for peer in self._accepted]

    def _accept(self) -> Link:
        wires = self._wires
        peer = Accepted(
            self._endpoints, self._flusher, wires.incarnation, self._accepted.discard, wires.secret
        )
        self._accepted.add(peer)
        return peer.link

    async def _connect(self, address: str) -> Dialled:
        """The connection to `address`; callers at the same time share one dial."""
        if self._closed:
            raise InstanceGone("this process closed its request plane")
        dial = self._dials.get(address)
        if dial is None:
            dial = self._dials[address] = self._tasks.start(self._dial(address), f"dial {address}")
            dial.add_done_callback(lambda _: self._dials.pop(address, None))
        try:
            result = await asyncio.shield(dial)
        except asyncio.CancelledError:
            if dial.cancelled():  # by `close`, not this caller
                raise InstanceGone("this process closed its request plane") from None
            raise
        if isinstance(result, DynamoError):
            raise type(result)(result.message, hint=result.hint)
        return result

    async def _dial(self, address: str) -> Dialled | DynamoError:
        request_id.set("")  # the connection outlives the request that needed it first
        try:
            incarnation = self._wires.incarnation_of(address)
        except InstanceGone as error:
            return error
        peer = Dialled(
            incarnation,
            self._flusher,
            on_retired=partial(self._retired, address),
            on_lost=partial(self._lost, address),
            secret=self._wires.secret,
        )
        try:
            await peer.greeting.connect(partial(self._wires.dial, address=address))
        except (OSError, TimeoutError, ProtocolError, InstanceGone) as error:
            self._tell_broken(address)
            return InstanceGone(f"{address} cannot be reached: {str(error) or 'no answer'}")
        former = self._dialled.get(address)
        if not peer.link.lost.is_set():
            self._dialled[address] = peer
            self._open.add(peer)
        if former is not None:
            former.retire()
        return peer

    def _retired(self, address: str, peer: Dialled) -> None:
        if self._dialled.get(address) is peer:
            del self._dialled[address]

    def _lost(self, address: str, peer: Dialled) -> None:
        self._open.discard(peer)
        if self._dialled.get(address) is peer:
            del self._dialled[address]
            self._tell_broken(address)

    def _tell_broken(self, address: str) -> None:
        if not self._closed:
            for callback in tuple(self._broken):
                callback(address)
