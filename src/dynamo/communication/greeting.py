"""The handshake at the end of who dials."""

from __future__ import annotations

import asyncio

from dynamo.communication.addresses import Address
from dynamo.communication.handshake import HANDSHAKE_S, pack_hello, read_hello
from dynamo.communication.link import Link
from dynamo.core.errors import InstanceGone, ProtocolError


class Greeting:
    """One connection's. Its peer passes on what happens until the greeting is `over`."""

    def __init__(self, link: Link, plane: str, incarnation: str) -> None:
        self._link = link
        self._plane = plane
        self._incarnation = incarnation
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """It has ended, well or not."""
        return self._answer.done()

    async def connect(self, there: Address) -> None:
        """Dial and greet. Raises `OSError`, `TimeoutError`; `InstanceGone` where another
        incarnation answers, `ProtocolError` where no version is shared. Nothing stays open then."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.create_connection(lambda: self._link, there.host, there.port)
                await self._answer
        except BaseException:
            self._answer.cancel()
            self._link.abort()
            raise

    def begin(self) -> None:
        """The connection stands: who dialled speaks first."""
        self._link.write(pack_hello(self._plane))

    def read(self, kind: int, body: bytes) -> None:
        """The first frame. Raises `ProtocolError`."""
        try:
            hello, _ = read_hello(kind, body, self._plane)
        except ProtocolError as error:
            self._answer.set_exception(error)
            raise
        if hello.incarnation != self._incarnation:
            self._answer.set_exception(InstanceGone("another process answers there now"))
            self._link.abort()
            return
        self._link.greeted()
        self._answer.set_result(None)

    def lost(self) -> None:
        """The connection is closed."""
        if not self.over:
            why = "the connection closed during the handshake"
            self._answer.set_exception(InstanceGone(why))
