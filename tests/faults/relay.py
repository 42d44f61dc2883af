"""A wire that can be hurt: everything to one process passes here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import starmap
from typing import Any

from dynamo.communication.frames import (
    END,
    MAX_FRAME_BYTES,
    Splitter,
    pack_frame,
    pack_items,
    unpack_items,
)
from dynamo.communication.requests import Requests
from dynamo.communication.requests.messages import DATA
from dynamo.core.tasks import Tasks


class Loss:
    """What a worker says, without one stream: the first that says something once this is `on`, up to
    and with its end."""

    def __init__(self) -> None:
        self.on = False
        self.lost = 0
        self._stream = 0
        self._splitter = Splitter(MAX_FRAME_BYTES)

    def __call__(self, data: bytes) -> bytes:
        return b"".join(starmap(self._frame, self._splitter.feed(data)))

    def _frame(self, kind: int, count: int, body: bytes) -> bytes:
        if kind != DATA or not self.on:
            return pack_frame(kind, body, count)
        streams, payloads, ends = list[int](), list[bytes](), list[int]()
        for stream, flags, payload in unpack_items(body, count):
            self._stream = self._stream or stream
            if stream == self._stream:
                self.lost += 1
                self.on = self.on and not flags & END
                continue
            if flags:
                ends.append(len(streams))
            streams.append(stream)
            payloads.append(payload)
        return pack_items(DATA, streams, payloads, ends) if streams else b""


class Relay:
    """Forwards to `target` (set it before the first connection). `delay_s`: added each way;
    `losses`: one a connection."""

    def __init__(self) -> None:
        self.target = ("", 0)
        self.delay_s = 0.0
        self.dialled = 0
        self.losses: list[Loss] = []
        self._tasks = Tasks()
        self._writers: set[asyncio.StreamWriter] = set()
        self._audible = asyncio.Event()
        self._audible.set()

    async def start(self) -> int:
        """Its port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def silence(self) -> None:
        """From now on nothing passes."""
        self._audible.clear()

    def forget(self) -> None:
        """Nothing passes over the connections there are, ever; new ones are well."""
        self._audible.clear()
        self._audible = asyncio.Event()
        self._audible.set()

    def heal(self) -> None:
        """What was held back passes."""
        self._audible.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await self._tasks.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.dialled += 1
        there, back = await asyncio.open_connection(*self.target)
        self.losses.append(Loss())
        self._tasks.start(self._pump(reader, back, bytes))
        self._tasks.start(self._pump(there, writer, self.losses[-1]))

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passed: Callable[[bytes], bytes],
    ) -> None:
        self._writers.add(writer)
        audible = self._audible
        try:
            while data := await reader.read(1 << 16):
                await audible.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(passed(data))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


class Relayed:
    """A request plane that announces itself behind a relay."""

    def __init__(self, plane: Requests, relay: Relay, port: int) -> None:
        self._plane = plane
        self._relay = relay
        self._port = port

    @property
    def address(self) -> str:
        host_port, _, incarnation = self._plane.address.removeprefix("tcp://").partition("/")
        host, _, port = host_port.rpartition(":")
        self._relay.target = (host, int(port))
        return f"tcp://127.0.0.1:{self._port}/{incarnation}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)
