"""Orders to a running deployment, over a socket in its state folder (mode 0700, so that only its
owner gives any): one JSON line there, JSON lines back until the connection closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dynamo.core.errors import DynamoError, ErrorRecord, InvalidRequest, NotFound, error_types
from dynamo.runtime.deployment import CONTROL_SOCKET, Deployment
from dynamo.runtime.processes.process_group import ProcessGroup

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10


class ControlRequest(msgspec.Struct, frozen=True):
    """`name`: of a process, or of a kind of them; `count`: replicas to scale to."""

    do: Literal["scale", "drain", "restart"]
    name: str
    count: int = 0


class ControlProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far it is; the last one says that it is done, or why not."""

    said: str = ""
    done: bool = False
    error: ErrorRecord | None = None


_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(ControlRequest).decode
_decode_progress = msgspec.json.Decoder(ControlProgress).decode


class ControlServer:
    """The supervisor's end."""

    def __init__(self, crew: ProcessGroup, folder: Path) -> None:
        self._group = crew
        self._folder = folder
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Take orders from now on, unless another supervisor of this deployment does: what runs
        under this one joins it then."""
        if _has_listener(self._folder):
            log.warning(
                "a deployment of this name runs already: joined to it, whose first supervisor "
                "takes the orders; another --deployment keeps them apart",
                extra={"fields": self._other_supervisor()},
            )
            return
        self._server = await asyncio.start_unix_server(
            self._handle_connection, sock=_bind_control_socket(self._folder), limit=MAX_LINE_BYTES
        )

    async def refresh_socket(self) -> None:
        """Listen again where somebody took the socket away, and keep it young."""
        if self._server is None:
            return
        try:
            os.utime(self._folder / CONTROL_SOCKET)
        except FileNotFoundError:
            self._server.close()
            self._server = None
            await self.start()

    async def stop(self) -> None:
        """Take no more."""
        if self._server is not None:
            self._server.close()
            (self._folder / CONTROL_SOCKET).unlink(missing_ok=True)

    def _other_supervisor(self) -> dict[str, object]:
        deployment = Deployment(self._folder.name, self._folder)
        others = [
            one
            for one in deployment.live_processes()
            if one.role == "supervisor" and one.pid != os.getpid()
        ]
        first = others[0] if others else None
        about = {"pid": first.pid, "url": first.address} if first is not None else {}
        return {"deployment": deployment.id, **about}

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        def answer(one: ControlProgress) -> None:
            writer.write(_encode(one) + b"\n")

        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            try:
                order = _decode_request(await reader.readline())
                log.info("order", extra={"fields": msgspec.to_builtins(order)})
                await self._execute(order, lambda said: answer(ControlProgress(said)))
            except (msgspec.DecodeError, ValueError) as error:
                answer(
                    ControlProgress(
                        error=ErrorRecord(InvalidRequest.code, f"not an order: {error}")
                    )
                )
            except DynamoError as error:
                answer(ControlProgress(error=ErrorRecord(error.code, error.message, error.hint)))
            else:
                answer(ControlProgress(done=True))
            await writer.drain()

    async def _execute(self, order: ControlRequest, tell: Callable[[str], None]) -> None:
        if order.do == "scale":
            await self._group.scale(order.name, order.count, tell)
        elif order.do == "drain":
            await self._group.drain(order.name, tell)
        else:
            await self._group.restart(order.name, tell)


def send_control_request(order: ControlRequest, folder: Path, timeout_s: float) -> Iterator[str]:
    """Give an order to the deployment whose state folder this is; yields what it says. Raises what
    it raises, `NotFound` where nobody takes orders, `TimeoutError`. Blocks."""
    with socket.socket(socket.AF_UNIX) as connection, _short_socket_path(folder) as path:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError as error:
            raise NotFound(
                f"{folder.name} takes no orders: {error.strerror}",
                hint="only a deployment that was started by `dynamo run` or `dynamo serve` does",
            ) from None
        connection.sendall(_encode(order) + b"\n")
        for line in connection.makefile("rb"):
            answer = _decode_progress(line)
            if answer.error is not None:
                kind = error_types().get(answer.error.code, DynamoError)
                raise kind(answer.error.message, hint=answer.error.hint)
            if answer.said:
                yield answer.said
            if answer.done:
                return
    raise NotFound(f"{folder.name} ended before it had obeyed")


def _has_listener(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, _short_socket_path(folder) as path:
        return probe.connect_ex(path) == 0


def _bind_control_socket(folder: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    with _short_socket_path(folder) as path:
        Path(path).unlink(missing_ok=True)
        listening.bind(path)
    return listening


@contextlib.contextmanager
def _short_socket_path(folder: Path) -> Iterator[str]:
    """The socket's path, short enough for its address (108 bytes) wherever the folder lies."""
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{at}/{CONTROL_SOCKET}"
    finally:
        os.close(at)
