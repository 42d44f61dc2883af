"""The request plane inside one process: the same calls and streams, no bytes between them.

What a handler sends reaches the caller in the next turn of the loop, as over a wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
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
        self.severed = False
        self.holding: set[_Wire] = set()

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
        await self.endpoints.withdraw(endpoint, drain_s)

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
            wire.leave()

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
        for wire in list(self._wires.values()):
            wire.leave()
        for wire in list(self.accepted):
            wire.die()

    def sever(self) -> None:
        """The network reaches this process no more: whatever is said to it or by it waits."""
        self.severed = True

    def rejoin(self) -> None:
        """The network reaches it again: what waited arrives, in order."""
        self.severed = False
        for wire in list(self.holding):
            wire.release()

    def _connect(self, address: str) -> _Wire:
        there = _planes.get(address)
        if there is None or self._address not in _planes:
            self._tell_broken(address)
            raise InstanceGone(f"nobody is at {address}")
        wire = self._wires[address] = _Wire(self, there)
        there.accepted.add(wire)
        return wire

    def forget(self, wire: _Wire, address: str) -> None:
        """The wire from here to `address` is gone."""
        if self._wires.get(address) is wire:
            del self._wires[address]
            if self._address in _planes:
                self._tell_broken(address)

    def _tell_broken(self, address: str) -> None:
        for callback in tuple(self._broken):
            callback(address)


class _Wire:
    """One connection; what crosses it takes a turn of the loop, in order. While the network is
    severed it waits, the end of the connection too: each end learns only then of the other's."""

    def __init__(self, here: MemoryRequests, there: MemoryRequests) -> None:
        self._here = here
        self._there = there
        self._loop = asyncio.get_running_loop()
        self._left = False
        self._dead = False
        self._held: list[Callable[[], object]] = []
        self.calls = Calls(self)
        self._outbox = Outbox(self._arm)

    def open(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TooLarge(f"a request of {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
        self._send(partial(self._opened, stream, endpoint, context, window_bytes, payload))

    def cancel(self, stream: int) -> None:
        self._send(partial(self._cancelled, stream))

    def credit(self, stream: int, size_bytes: int) -> None:
        self._send(partial(self._released, stream, size_bytes))

    def leave(self) -> None:
        """The caller's end breaks it: its calls fail, handlers are cancelled when they hear it."""
        self._end_calls()
        self._pass(self._end_handlers)

    def die(self) -> None:
        """The handlers' end is gone: they are cancelled, calls fail when they hear it."""
        self._end_handlers()
        self._pass(self._end_calls)

    def release(self) -> None:
        """The network may be whole again: what waited arrives."""
        if self._severed:
            return
        held, self._held = self._held, []
        self._here.holding.discard(self)
        self._there.holding.discard(self)
        for crossing in held:
            crossing()

    @property
    def _severed(self) -> bool:
        return self._here.severed or self._there.severed

    def _send(self, crossing: Callable[[], object]) -> None:
        if self._severed:
            self._hold(crossing)
        else:
            self._loop.call_soon(crossing)

    def _pass(self, crossing: Callable[[], object]) -> None:
        if self._severed:
            self._hold(crossing)
        else:
            crossing()

    def _hold(self, crossing: Callable[[], object]) -> None:
        self._held.append(crossing)
        self._here.holding.add(self)
        self._there.holding.add(self)

    def _end_calls(self) -> None:
        if not self._left:
            self._left = True
            self._here.forget(self, self._there.address)
            self.calls.fail(WorkerFailed(f"the connection to {self._there.address} broke"))

    def _end_handlers(self) -> None:
        if not self._dead:
            self._dead = True
            self._there.accepted.discard(self)
            self._outbox.leave_all()

    def _arm(self) -> None:
        self._send(self._deliver)

    def _opened(
        self, stream: int, endpoint: str, context: Context, window_bytes: int, payload: bytes
    ) -> None:
        if not self._dead:
            incoming = Stream(self._outbox, stream, context, window_bytes)
            self._there.endpoints.start(endpoint, payload, incoming)

    def _cancelled(self, stream: int) -> None:
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
