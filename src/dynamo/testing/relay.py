"""A TCP relay to put into a path, for tests of what networks do: cut, silence, delay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from dynamo.core.tasks import BackgroundTasks


class Relay:
    """`async with Relay(port) as relay`: `relay.port` leads to `port` on this machine.

    `silent`: bytes are held, connections too, as by a network that drops everything; what was held
    is passed on when it is False again. `delay_s`: added to every piece. `to` may be set later, up
    to the first connection; `dialled`: how many there were.
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
        """Nothing passes now."""
        return not self._flowing.is_set()

    @silent.setter
    def silent(self, silent: bool) -> None:
        if silent:
            self._flowing.clear()
        else:
            self._flowing.set()

    def blackhole_connections(self) -> None:
        """Nothing passes over the connections there are, ever; new ones are well."""
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def abort_connections(self) -> None:
        """Break every connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def make_reply_filter(self) -> Callable[[bytes], bytes]:
        """What becomes of that which comes back over one new connection."""
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
        passing = self._flowing
        await passing.wait()
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(forth)
        self._tasks.start(self._forward(reader, forth, passing, bytes))
        self._tasks.start(self._forward(back, writer, passing, self.make_reply_filter()))

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passing: asyncio.Event,
        passed: Callable[[bytes], bytes],
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                await passing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(passed(data))
                await writer.drain()
        except OSError:
            writer.transport.abort()
        finally:
            writer.close()
            self._writers.discard(writer)
