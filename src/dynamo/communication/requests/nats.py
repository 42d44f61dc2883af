"""Requests through NATS, and straight to the instance while NATS is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

from dynamo.communication.nats_link import NatsLink
from dynamo.communication.nats_wires import SCHEME, NatsWires
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.requests.endpoints import Endpoints
from dynamo.communication.requests.plane import Handler, Requests, Sink, Window
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.communication.wires import TcpWires
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone
from dynamo.core.tasks import Tasks

BYPASS_S: Final = 5.0
"""Longer than either end needs to notice that it has lost NATS."""


class NatsRequests(Requests):
    """An address is `nats://INCARNATION/tcp://HOST:PORT/INCARNATION`: by NATS, and without it."""

    def __init__(self, nats: NatsLink, wires: NatsWires, direct: TcpWires) -> None:
        endpoints = Endpoints()
        self._nats = nats
        self._wires = wires
        self._endpoints = endpoints
        self._through = TcpRequests(wires, endpoints)
        self._direct = TcpRequests(direct, endpoints)
        self._addresses: dict[str, str] = {}
        self._broken: list[Callable[[str], None]] = []
        self._tasks = Tasks()
        self._closed = False
        self._bypassed: set[str] = set()
        self._through.on_broken(self._broke_through)
        self._direct.on_broken(self._broke)

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """NATS is dialled in the background. Raises `ConfigError`."""
        direct = await TcpWires.open(options.fallback, options)
        link = await NatsLink.open(url, options)
        return cls(link, NatsWires(link, options), direct)

    @property
    def trouble(self) -> str:
        return self._nats.trouble

    @property
    def address(self) -> str:
        return f"{self._through.address}/{self._direct.address}"

    async def serve(self, endpoint: str, handler: Handler) -> None:
        self._endpoints.serve(endpoint, handler)
        await self._direct.listen()
        await self._through.listen()

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
        window: Window | None = None,
    ) -> None:
        through, direct = split_address(address)
        self._addresses[through] = self._addresses[direct] = address
        await self._nats.tried.wait()
        if self._nats.up and through not in self._bypassed:
            try:
                await self._through.call(through, endpoint, payload, context, sink, window=window)
                return
            except InstanceGone:  # nothing was done: that end may have lost NATS
                if not direct:
                    raise
        await self._direct.call(direct, endpoint, payload, context, sink, window=window)

    def heard(self, address: str) -> int:
        through, direct = split_address(address)
        return self._through.heard(through) + self._direct.heard(direct)

    def break_off(self, address: str) -> None:
        through, direct = split_address(address)
        self._through.break_off(through)
        self._direct.break_off(direct)

    async def answers_beside(self, address: str, endpoint: str) -> bool:
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
        self._through.break_off(through)

    def on_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self._broken.append(callback)
        return lambda: self._broken.remove(callback)

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()
        await self._through.close()
        await self._direct.close()
        await self._nats.close()
        self._wires.leave()

    def abort(self) -> None:
        """Break every connection at once, as a crash would."""
        self._through.abort()
        self._direct.abort()

    def _broke_through(self, address: str) -> None:
        """NATS, or one end's connection to it, may have gone, and not the instance: look."""
        _, direct = split_address(self._addresses.get(address, address))
        if not direct:
            self._broke(address)
        elif not self._closed:
            self._tasks.start(self._direct.reach(direct), f"reach {direct}")

    def _broke(self, address: str) -> None:
        whole = self._addresses.get(address, address)
        for callback in tuple(self._broken):
            callback(whole)


def split_address(address: str) -> tuple[str, str]:
    """The two parts; the second may be empty. Raises `InstanceGone`."""
    if not address.startswith(SCHEME):
        raise InstanceGone(f"{address!r} is no address of an instance")
    incarnation, _, direct = address.removeprefix(SCHEME).partition("/")
    return SCHEME + incarnation, direct
