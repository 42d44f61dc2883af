"""Connections within one process: what an end writes arrives in the next iteration of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dynamo.communication.addresses import new_incarnation
from dynamo.communication.link import Link
from dynamo.communication.transports import PlaneTransport
from dynamo.core.errors import InstanceGone

SCHEME: Final = "memory://"
_listening: dict[str, MemoryPlaneTransport] = {}


class MemoryConnection(asyncio.Transport):
    """An end of a connection: the asyncio transport of its link. `peer` is the other end."""

    peer: MemoryConnection

    def __init__(self, process: MemoryPlaneTransport, link: Link) -> None:
        super().__init__()
        self.process = process
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._held: list[Callable[[], None]] = []
        self._closed = False
        process.connections[self] = None

    def open(self) -> None:
        """Tell the link that the connection is up."""
        self._link.connection_made(self)

    def write(self, data: Any) -> None:
        if not self._closed:
            self._send(partial(self.peer.receive, data))

    def receive(self, data: bytes) -> None:
        """Handle what the peer has written."""
        if not self._closed:
            self._link.data_received(data)

    def close(self) -> None:
        """End the connection: here now, at the peer behind what was written."""
        if not self._closed:
            self.lose()
            self._send(self.peer.lose)

    abort = close

    def lose(self) -> None:
        """End the connection at this end."""
        if not self._closed:
            self._closed = True
            del self.process.connections[self]
            self._loop.call_soon(self._link.connection_lost, None)

    def send_held(self) -> None:
        """Send what was held, unless one of the processes still is severed."""
        if not self._is_severed:
            messages, self._held = self._held, []
            for message in messages:
                message()

    @property
    def _is_severed(self) -> bool:
        return self.process.severed or self.peer.process.severed

    def _send(self, message: Callable[[], None]) -> None:
        if self._is_severed:
            self._held.append(message)
            for process in (self.process, self.peer.process):
                process.holding[self] = None
        else:
            self._loop.call_soon(message)

    def pause_reading(self) -> None:
        """Do nothing: the link keeps what it does not handle yet."""

    def resume_reading(self) -> None:
        """Do nothing, like `pause_reading`."""

    def is_closing(self) -> bool:
        return self._closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: nothing waits for a reader."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.peer.process.address if name == "peername" else default


class MemoryPlaneTransport(PlaneTransport):
    """Connections to `memory://INCARNATION`. Each object stands for a process, which tests cut off
    from the others by `sever`."""

    secret = ""

    def __init__(self) -> None:
        super().__init__()
        self.incarnation = new_incarnation()
        self.severed = False
        self.connections: dict[MemoryConnection, None] = {}
        self.holding: dict[MemoryConnection, None] = {}
        """The connections from and to this process that hold something."""
        self._accept: Callable[[], Link] | None = None

    @property
    def address(self) -> str:
        return SCHEME + self.incarnation

    @property
    def is_listening(self) -> bool:
        return self._accept is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        self._accept = accept
        _listening[self.address] = self

    async def dial(self, link: Link, address: str) -> None:
        other = _listening.get(address)
        if other is None or other._accept is None:  # noqa: SLF001 - an object of this class
            raise ConnectionRefusedError
        near, far = MemoryConnection(self, link), MemoryConnection(other, other._accept())  # noqa: SLF001
        near.peer, far.peer = far, near
        far.open()
        near.open()

    def incarnation_of(self, address: str) -> str:
        if not address.startswith(SCHEME):
            raise InstanceGone(f"{address!r} is no address of an instance")
        return address.removeprefix(SCHEME)

    def stop_listening(self) -> None:
        self._accept = None
        _listening.pop(self.address, None)

    def sever(self, *, breaks: bool = False) -> None:
        """Hold all bytes from and to this process, like a broken network. If it `breaks`, present
        connections end. For tests."""
        self.severed = True
        for connection in tuple(self.connections) if breaks else ():
            connection.lose()
            connection.peer.lose()

    def rejoin(self) -> None:
        """End `sever`: what was held arrives in order."""
        self.severed = False
        holding, self.holding = self.holding, {}
        for connection in holding:
            connection.send_held()
