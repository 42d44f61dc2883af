"""The request plane over NATS, with direct TCP connections while NATS is unreachable."""

from __future__ import annotations

import asyncio
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
from dynamo.core.shared_payload import SharedPayload
from dynamo.core.tasks import BackgroundTasks, wait_at_most

BYPASS_S: Final = 5.0
"""Duration of a bypass: longer than either end needs to notice that it has lost NATS."""
DIRECT_DIAL_AFTER_S: Final = 0.3
"""Time after which an unanswered connection through NATS is raced by a direct one."""


class NatsRequests(Requests):
    """The backend `nats://HOST:PORT`.

    Addresses have the form `nats://INCARNATION/tcp://HOST:PORT/INCARNATION`. The first part is
    reached through NATS, the second one directly.
    """

    def __init__(
        self, nats: NatsClient, transport: NatsPlaneTransport, direct: TcpPlaneTransport
    ) -> None:
        super().__init__()
        endpoints = Endpoints()
        self._nats = nats
        self._nats_transport = transport
        self._endpoints = endpoints
        self._via_nats = TcpRequests(transport, endpoints)
        self._direct = TcpRequests(direct, endpoints)
        self._addresses: dict[str, str] = {}
        self._tasks = BackgroundTasks()
        self._closed = False
        self._bypassed: set[str] = set()
        self._via_nats.on_connection_broken(self._on_nats_broken)
        self._direct.on_connection_broken(self._on_broken)

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Start connecting to NATS in the background. Raises `ConfigError`."""
        direct = await TcpPlaneTransport.open(options.direct_url, options)
        client = await NatsClient.open(url, options)
        return cls(client, NatsPlaneTransport(client, options), direct)

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
        shared: SharedPayload | None = None,
    ) -> None:
        arguments = endpoint, payload, context, sink
        nats_address, direct_address = split_address(address)
        self._addresses[nats_address] = self._addresses[direct_address] = address
        if await self._prefers_nats(nats_address, direct_address):
            try:
                await self._via_nats.call(nats_address, *arguments, window=window, shared=shared)
                return
            except InstanceGone:  # no work was done; the instance may have lost NATS
                if not direct_address:
                    raise
        await self._direct.call(direct_address, *arguments, window=window, shared=shared)

    async def _prefers_nats(self, nats_address: str, direct_address: str) -> bool:
        """Return True if the instance should be called through NATS, after connecting to it.

        While NATS leaves the connection unanswered for DIRECT_DIAL_AFTER_S, a direct one is dialled
        beside it, and the first that succeeds wins: NATS may be frozen without this having been
        noticed yet, and an instance on another host may listen on loopback.
        """
        if not direct_address:
            await self._nats.first_attempt_done.wait()
        elif not self._nats.first_attempt_done.is_set():
            await wait_at_most(self._nats.first_attempt_done.wait(), DIRECT_DIAL_AFTER_S)
        if not self._nats.connected or nats_address in self._bypassed:
            return False
        if not direct_address or self._via_nats.is_connected(nats_address):
            return True
        connecting = self._tasks.start(
            self._via_nats.ensure_connected(nats_address), f"reach {nats_address}"
        )
        await asyncio.wait({connecting}, timeout=DIRECT_DIAL_AFTER_S)
        if not connecting.done():
            directly = self._tasks.start(
                self._direct.ensure_connected(direct_address), f"reach {direct_address}"
            )
            await asyncio.wait({connecting, directly}, return_when=asyncio.FIRST_COMPLETED)
            if not self._direct.is_connected(direct_address):
                await asyncio.wait({connecting})
        return self._via_nats.is_connected(nats_address)

    def count_calls(self) -> int:
        return self._endpoints.count_calls()

    def count_received_frames(self, address: str) -> int:
        nats_address, direct_address = split_address(address)
        via_nats = self._via_nats.count_received_frames(nats_address)
        return via_nats + self._direct.count_received_frames(direct_address)

    def count_sent_bytes(self, address: str) -> tuple[int, int]:
        nats_address, direct_address = split_address(address)
        sent, unsent = self._via_nats.count_sent_bytes(nats_address)
        direct_sent, direct_unsent = self._direct.count_sent_bytes(direct_address)
        return sent + direct_sent, unsent + direct_unsent

    def disconnect(self, address: str) -> None:
        nats_address, direct_address = split_address(address)
        self._via_nats.disconnect(nats_address)
        self._direct.disconnect(direct_address)

    async def probe_directly(self, address: str, endpoint: str) -> bool:
        _, direct_address = split_address(address)
        if not direct_address:
            return False
        try:
            context = Context("direct-probe")
            await self._direct.call(direct_address, endpoint, b"", context, lambda _: True)
        except (InstanceGone, OSError):
            return False
        except DynamoError:
            return True
        return True

    def bypass(self, address: str) -> None:
        nats_address, _ = split_address(address)
        self._bypassed.add(nats_address)
        asyncio.get_running_loop().call_later(BYPASS_S, self._bypassed.discard, nats_address)
        self._via_nats.disconnect(nats_address)

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()
        await self._via_nats.close()
        await self._direct.close()
        await self._nats.close()
        self._nats_transport.close()

    def abort(self) -> None:
        """Abort every connection, as a crash would. For tests."""
        self._via_nats.abort()
        self._direct.abort()

    def _on_nats_broken(self, address: str) -> None:
        """Check with a direct connection whether the instance is gone or only NATS."""
        _, direct_address = split_address(self._addresses.get(address, address))
        if not direct_address:
            self._on_broken(address)
        elif not self._closed:
            self._tasks.start(self._direct.ensure_connected(direct_address), f"reach {address}")

    def _on_broken(self, address: str) -> None:
        self._notify_broken(self._addresses.get(address, address))


def split_address(address: str) -> tuple[str, str]:
    """Return the NATS part and the direct part, which may be "". Raises `InstanceGone`."""
    if not address.startswith(SCHEME):
        raise InstanceGone(f"{address!r} is not the address of an instance")
    incarnation, _, direct_address = address.removeprefix(SCHEME).partition("/")
    return SCHEME + incarnation, direct_address
