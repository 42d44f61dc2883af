"""A TCP relay for tests of network faults: broken connections, silence, delay."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Literal, Self

from dynamo.core.tasks import BackgroundTasks

ConnectionEnd = Literal["reset", "closed", "silent"]
"""How a connection ends: by TCP RST, by FIN, or without a packet."""

_LINGER_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with time 0: close sends RST instead of FIN."""


class Relay:
    """Forwards connections from `relay.port` to `target_port` on this machine.

    While `silent` is True, bytes and new connections are held, as by a network that drops packets.
    They are passed on when it is False again. Each read is delayed by `delay_s`. `target_port` may
    be set until the first connection. `connection_count` counts accepted connections.
    """

    def __init__(self, port: int = 0) -> None:
        self.target_port = port
        self.connection_count = 0
        self._tasks = BackgroundTasks(on_failure=lambda _: None)
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self.delay_s = 0.0
        self.port = 0

    @property
    def silent(self) -> bool:
        """True while nothing is forwarded."""
        return not self._flowing.is_set()

    @silent.setter
    def silent(self, silent: bool) -> None:
        if silent:
            self._flowing.clear()
        else:
            self._flowing.set()

    def blackhole_connections(self) -> None:
        """Forward nothing more over the present connections. New connections work."""
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def end_connections(self, end: ConnectionEnd) -> None:
        """End every connection in the given way. New connections work."""
        if end == "silent":
            self.blackhole_connections()
            return
        for writer in tuple(self._writers):
            if end == "reset":
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET
                )
                writer.transport.abort()
            else:
                writer.close()

    def abort_connections(self) -> None:
        """Abort every connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def make_reply_filter(self) -> Callable[[bytes], bytes]:
        """Return a function that may change the bytes sent back over one new connection."""
        return bytes

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.abort_connections()
        await self._tasks.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        self._writers.add(writer)
        self._tasks.start(self._connect(reader, writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flowing = self._flowing
        await flowing.wait()
        try:
            target_reader, target_writer = await asyncio.open_connection(
                "127.0.0.1", self.target_port
            )
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(target_writer)
        self._tasks.start(self._forward(reader, target_writer, flowing, bytes))
        self._tasks.start(self._forward(target_reader, writer, flowing, self.make_reply_filter()))

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        flowing: asyncio.Event,
        transform: Callable[[bytes], bytes],
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                await flowing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(transform(data))
                await writer.drain()
        except OSError:
            writer.transport.abort()
        finally:
            writer.close()
            self._writers.discard(writer)
