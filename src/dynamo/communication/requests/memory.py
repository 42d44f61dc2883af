"""The request plane inside one process: the same calls and streams, no bytes between them.

What a handler sends reaches the caller in the next turn of the loop, as over a wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from dynamo.communication.addresses import new_incarnation
from dynamo.communication.frames import END, MAX_PAYLOAD_BYTES
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.requests.calls import Calls
from dynamo.communication.requests.endpoints import Endpoints
from dynamo.communication.requests.plane import Handler, Requests, Sink, Window
from dynamo.communication.requests.streams import Outbox, Stream
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, TooLarge, WorkerFailed

_planes: dict[str, MemoryRequests] = {}


class MemoryRequests(Requests):
    """`memory:`; every object is a process of its own to the others."""

    def __init__(self) -> None:
        self._address = f"memory://{new_incarnation()}"
        self.endpoints = Endpoints()
        self._wires: dict[str, _Wire] = {}
        self.accepted: set[_Wire] = set()
        self._broken: list[Callable[[str], None]] = []

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """All of `memory:` is one network."""
        del url, options
        plane = cls()
        _planes[plane.address] = plane
        return plane

    @property
    def address(self) -> str:
        return self._address

    async def serve(self, endpoint: str, handler: Handler) -> None:
        self.endpoints.serve(endpoint, handler)

    async def withdraw(self, endpoint: str, drain_s: float | None = 0.0) -> None:
        served = self.endpoints.refuse(endpoint)
        if served is not None:
            await served.drain(drain_s)

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
        wire = self._wires.get(address) or self._connect(address)
        await wire.calls.call(endpoint, payload, context, sink, window)

    def heard(self, address: str) -> int:
        wire = self._wires.get(address)
        return 0 if wire is None else wire.calls.frames

    def break_off(self, address: str) -> None:
        wire = self._wires.get(address)
        if wire is not None:
            wire.cut()

    def on_broken(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self._broken.append(callback)
        return lambda: self._broken.remove(callback)

    async def close(self) -> None:
        _planes.pop(self._address, None)
        await self.endpoints.close()
        await asyncio.sleep(0)  # what the handlers' ends queued is delivered
        self.abort()

    def abort(self) -> None:
        """Break every connection at once, as a crash would."""
        _planes.pop(self._address, None)
        for wire in [*self._wires.values(), *self.accepted]:
            wire.cut()

    def _connect(self, address: str) -> _Wire:
        there = _planes.get(address)
        if there is None or self._address not in _planes:
            self._tell_broken(address)
            raise InstanceGone(f"nobody is at {address}")
        wire = self._wires[address] = _Wire(self, there)
        there.accepted.add(wire)
        return wire

    def forget(self, wire: _Wire, there: MemoryRequests) -> None:
        """A wire from here to there was cut."""
        there.accepted.discard(wire)
        if self._wires.pop(there.address, None) is not None and self._address in _planes:
            self._tell_broken(there.address)

    def _tell_broken(self, address: str) -> None:
        for callback in tuple(self._broken):
            callback(address)


class _Wire:
    """One connection; what crosses it takes a turn of the loop, in order."""

    def __init__(self, here: MemoryRequests, there: MemoryRequests) -> None:
        self._here = here
        self._there = there
        self._loop = asyncio.get_running_loop()
        self._cut = False
        self.calls = Calls(self)
        self._outbox = Outbox(self._arm)

    def open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"a request of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
        self._loop.call_soon(self._opened, stream, endpoint, context, window_bytes, payload)

    def cancel(self, stream: int) -> None:
        self._loop.call_soon(self._left, stream)

    def credit(self, stream: int, size_bytes: int) -> None:
        self._loop.call_soon(self._released, stream, size_bytes)

    def cut(self) -> None:
        """Break the connection: calls fail, handlers are cancelled."""
        if self._cut:
            return
        self._cut = True
        self._here.forget(self, self._there)
        self._outbox.leave_all()
        self.calls.fail(WorkerFailed(f"the connection to {self._there.address} broke"))

    def _arm(self) -> None:
        self._loop.call_soon(self._deliver)

    def _opened(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        if not self._cut:
            incoming = Stream(self._outbox, stream, context, window_bytes)
            self._there.endpoints.start(endpoint, payload, incoming)

    def _left(self, stream: int) -> None:
        if (incoming := self._outbox.open.get(stream)) is not None:
            incoming.leave()

    def _released(self, stream: int, size_bytes: int) -> None:
        if (incoming := self._outbox.open.get(stream)) is not None:
            incoming.release(size_bytes)

    def _deliver(self) -> None:
        outbox = self._outbox
        ends = set(outbox.ends)
        items = [
            (stream, END if index in ends else 0, payload)
            for index, (stream, payload) in enumerate(
                zip(outbox.streams, outbox.payloads, strict=True)
            )
        ]
        outbox.clear()
        self.calls.deliver(items)
