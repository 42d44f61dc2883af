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
from dynamo.runtime.crew import Crew
from dynamo.runtime.deployment import CONTROL, Deployment

log = logging.getLogger(__name__)

LINE_BYTES = 64 << 10


class Order(msgspec.Struct, frozen=True):
    """`name`: of a process, or of a kind of them; `count`: replicas to scale to."""

    do: Literal["scale", "drain", "restart"]
    name: str
    count: int = 0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far it is; the last one says that it is done, or why not."""

    said: str = ""
    done: bool = False
    error: ErrorRecord | None = None


_encode = msgspec.json.Encoder().encode
_read_order = msgspec.json.Decoder(Order).decode
_read_answer = msgspec.json.Decoder(Answer).decode


class Control:
    """The supervisor's end."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self._crew = crew
        self._folder = folder
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Take orders from now on, unless another supervisor of this deployment does: what runs
        under this one joins it then."""
        if _taken(self._folder):
            log.warning(
                "a deployment of this name runs already: joined to it, whose first supervisor "
                "takes the orders; another --deployment keeps them apart",
                extra={"fields": self._others()},
            )
            return
        self._server = await asyncio.start_unix_server(
            self._serve, sock=_listening(self._folder), limit=LINE_BYTES
        )

    async def keep(self) -> None:
        """Listen again where somebody took the socket away, and keep it young."""
        if self._server is None:
            return
        try:
            os.utime(self._folder / CONTROL)
        except FileNotFoundError:
            self._server.close()
            self._server = None
            await self.start()

    async def stop(self) -> None:
        """Take no more."""
        if self._server is not None:
            self._server.close()
            (self._folder / CONTROL).unlink(missing_ok=True)

    def _others(self) -> dict[str, object]:
        deployment = Deployment(self._folder.name, self._folder)
        others = [
            one
            for one in deployment.processes()
            if one.role == "supervisor" and one.pid != os.getpid()
        ]
        first = others[0] if others else None
        about = {"pid": first.pid, "url": first.address} if first is not None else {}
        return {"deployment": deployment.id, **about}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def answer(one: Answer) -> None:
            writer.write(_encode(one) + b"\n")

        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            try:
                order = _read_order(await reader.readline())
                log.info("order", extra={"fields": msgspec.to_builtins(order)})
                await self._obey(order, lambda said: answer(Answer(said)))
            except (msgspec.DecodeError, ValueError) as error:
                answer(Answer(error=ErrorRecord(InvalidRequest.code, f"not an order: {error}")))
            except DynamoError as error:
                answer(Answer(error=ErrorRecord(error.code, error.message, error.hint)))
            else:
                answer(Answer(done=True))
            await writer.drain()

    async def _obey(self, order: Order, tell: Callable[[str], None]) -> None:
        if order.do == "scale":
            await self._crew.scale(order.name, order.count, tell)
        elif order.do == "drain":
            await self._crew.drain(order.name, tell)
        else:
            await self._crew.restart(order.name, tell)


def give(order: Order, folder: Path, timeout_s: float) -> Iterator[str]:
    """Give an order to the deployment whose state folder this is; yields what it says. Raises what
    it raises, `NotFound` where nobody takes orders, `TimeoutError`. Blocks."""
    with socket.socket(socket.AF_UNIX) as connection, _short(folder) as path:
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
            answer = _read_answer(line)
            if answer.error is not None:
                kind = error_types().get(answer.error.code, DynamoError)
                raise kind(answer.error.message, hint=answer.error.hint)
            if answer.said:
                yield answer.said
            if answer.done:
                return
    raise NotFound(f"{folder.name} ended before it had obeyed")


def _taken(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, _short(folder) as path:
        return probe.connect_ex(path) == 0


def _listening(folder: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    with _short(folder) as path:
        Path(path).unlink(missing_ok=True)
        listening.bind(path)
    return listening


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The socket's path, short enough for its address (108 bytes) wherever the folder lies."""
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{at}/{CONTROL}"
    finally:
        os.close(at)
