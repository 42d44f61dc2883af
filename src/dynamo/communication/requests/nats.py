"""Requests through NATS, and straight to the instance while NATS is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

from dynamo.communication.nats_client import NatsClient
from dynamo.communication.nats_transport import SCHEME, NatsPlaneTransport
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.requests.endpoints import Endpoints
from dynamo.communication.requests.plane import FlowWindow, RequestHandler, Requests, Sink
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.communication.transports import TcpPlaneTransport
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone
from dynamo.core.tasks import BackgroundTasks

BYPASS_S: Final = 5.0
"""Longer than either end needs to notice that it has lost NATS."""


class NatsRequests(Requests):
    """An address is `nats://INCARNATION/tcp://HOST:PORT/INCARNATION`: by NATS, and without it."""

    def __init__(
        self, nats: NatsClient, wires: NatsPlaneTransport, direct: TcpPlaneTransport
    ) -> None:
        endpoints = Endpoints()
        self._nats = nats
        self._nats_transport = wires
        self._endpoints = endpoints
        self._via_nats = TcpRequests(wires, endpoints)
        self._direct = TcpRequests(direct, endpoints)
        self._addresses: dict[str, str] = {}
        self._broken_callbacks: list[Callable[[str], None]] = []
        self._tasks = BackgroundTasks()
        self._closed = False
        self._bypassed: set[str] = set()
        self._via_nats.on_connection_broken(self._on_nats_broken)
        self._direct.on_connection_broken(self._on_broken)

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """NATS is dialled in the background. Raises `ConfigError`."""
        direct = await TcpPlaneTransport.open(options.direct_url, options)
        link = await NatsClient.open(url, options)
        return cls(link, NatsPlaneTransport(link, options), direct)

    @property
    def connection_error(self) -> str:
        return self._nats.connection_error

    @property
    def address(self) -> str:
        return f"{self._via_nats.address}/{self._direct.address}"

    async def serve(self, endpoint: str, handler: RequestHandler) -> None:
        self._endpoints.serve(endpoint, handler)
        await self._direct.listen()
        await self._via_nats.listen()

    async def withdraw(self, endpoint: str, drain_s: float | None = 0.0) -> None:
        await self._endpoints.withdraw(endpoint, drain_s)

    async def call(
        self,
        address: str,
        endpoint: str,
        payload: bytes,
        context: Context,
        sink: Sink,
        *,
        window: FlowWindow | None = None,
    ) -> None:
        through, direct = split_address(address)
        self._addresses[through] = self._addresses[direct] = address
        await self._nats.first_attempt_done.wait()
        if self._nats.connected and through not in self._bypassed:
            try:
                await self._via_nats.call(through, endpoint, payload, context, sink, window=window)
                return
            except InstanceGone:  # nothing was done: that end may have lost NATS
                if not direct:
                    raise
        await self._direct.call(direct, endpoint, payload, context, sink, window=window)

    def count_received_frames(self, address: str) -> int:
        through, direct = split_address(address)
        return self._via_nats.count_received_frames(through) + self._direct.count_received_frames(
            direct
        )

    def disconnect(self, address: str) -> None:
        through, direct = split_address(address)
        self._via_nats.disconnect(through)
        self._direct.disconnect(direct)

    async def probe_directly(self, address: str, endpoint: str) -> bool:
        _, direct = split_address(address)
        if not direct:
            return False
        try:
            await self._direct.call(direct, endpoint, b"", Context("beside"), lambda _: True)
        except (InstanceGone, OSError):
            return False
        except DynamoError:
            return True
        return True

    def bypass(self, address: str) -> None:
        through, _ = split_address(address)
        self._bypassed.add(through)
        asyncio.get_running_loop().call_later(BYPASS_S, self._bypassed.discard, through)
        self._via_nats.disconnect(through)

    def on_connection_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self._broken_callbacks.append(callback)
        return lambda: self._broken_callbacks.remove(callback)

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()
        await self._via_nats.close()
        await self._direct.close()
        await self._nats.close()
        self._nats_transport.close()

    def abort(self) -> None:
        """Break every connection at once, as a crash would."""
        self._via_nats.abort()
        self._direct.abort()

    def _on_nats_broken(self, address: str) -> None:
        """NATS, or one end's connection to it, may have gone, and not the instance: look."""
        _, direct = split_address(self._addresses.get(address, address))
        if not direct:
            self._on_broken(address)
        elif not self._closed:
            self._tasks.start(self._direct.ensure_connected(direct), f"reach {direct}")

    def _on_broken(self, address: str) -> None:
        whole = self._addresses.get(address, address)
        for callback in tuple(self._broken_callbacks):
            callback(whole)


def split_address(address: str) -> tuple[str, str]:
    """The two parts; the second may be empty. Raises `InstanceGone`."""
    if not address.startswith(SCHEME):
        raise InstanceGone(f"{address!r} is no address of an instance")
    incarnation, _, direct = address.removeprefix(SCHEME).partition("/")
    return SCHEME + incarnation, direct
