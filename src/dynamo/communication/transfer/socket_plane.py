"""The part of `shm:` and `tcp:` that is alike: a listening socket, its connections, threads."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from abc import abstractmethod
from typing import Final

from dynamo.communication.transfer.backend import TransferBackend
from dynamo.communication.transfer.plane import TransferSetup
from dynamo.communication.transfer.sockets import Attach, SocketLink, accept
from dynamo.communication.transfer.threads import CopyThreads
from dynamo.communication.transports import UnprovenLinks
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import BackgroundTasks

log = logging.getLogger(__name__)

MAX_THREADS: Final = 32
ACCEPT_PAUSE_S: Final = 1.0
"""Pause after a failed accept, which happens when descriptors run out."""


class SocketTransfer(TransferBackend):
    """A backend whose peers connect to a socket. `secret` proves both ends of a connection."""

    server_tls: ssl.SSLContext | None = None

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        self.unproven_links = UnprovenLinks()
        self.threads = CopyThreads("transfer", MAX_THREADS)
        # Threads of their own: two processes whose pulls wait for each other must keep serving.
        self.serving_threads = CopyThreads("transfer-serve", MAX_THREADS)
        self._tasks = BackgroundTasks()
        self._listening_socket: socket.socket | None = None

    @property
    def attach(self) -> Attach:
        """The layout of this process, which a peer's must equal in the handshake."""
        return Attach(self.layout, 0 if self.region is None else self.region.slot_bytes)

    async def close(self) -> None:
        await self._tasks.close()
        await super().close()
        if self._listening_socket is not None:
            self._listening_socket.close()
            self._listening_socket = None
        self.threads.close()
        self.serving_threads.close()

    @abstractmethod
    async def _serve(self, sock: socket.socket) -> None:
        """Serve a proven connection until its end. Raises `OSError` when it breaks."""

    def _start_accepting(self, listening_socket: socket.socket) -> None:
        listening_socket.setblocking(False)
        self._listening_socket = listening_socket
        self._tasks.start(self._accept_forever(listening_socket), "transfer accept")

    async def _accept_forever(self, listening_socket: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening_socket)
            except OSError as error:
                log.warning("accepting a peer failed", extra={"fields": {"error": str(error)}})
                await self.clock.sleep(ACCEPT_PAUSE_S)
                continue
            self._tasks.start(self._serve_connection(sock), "transfer connection")

    async def _serve_connection(self, sock: socket.socket) -> None:
        task = asyncio.current_task()
        link = SocketLink(sock, on_abort=lambda: task and task.cancel())
        try:
            self._check_peer(sock)
            await accept(link, self, self.server_tls, self.attach)
            await self._serve(link.sock)
        except (DynamoError, OSError, TimeoutError) as error:
            fields = {"error": str(error), "backend": type(self).__name__}
            log.info("connection of a peer ended", extra={"fields": fields})
        finally:
            link.close()

    def _check_peer(self, sock: socket.socket) -> None:
        """Refuse a peer before its first byte. Raises `ProtocolError`."""
