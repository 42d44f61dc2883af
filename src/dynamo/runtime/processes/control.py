"""Control requests to a running deployment over a socket in its state folder. The folder has mode
0700, so only its owner can send requests. A request is a JSON line. The answer is JSON lines until
the connection closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynamo.core.errors import DynamoError, ErrorRecord, InvalidRequest, NotFound, error_types
from dynamo.runtime.deployment import CONTROL_SOCKET, Deployment
from dynamo.runtime.processes.process_group import ControlProgressCallback, ProcessGroup
from dynamo.runtime.processes.served_models import ServedModels
from dynamo.runtime.processes.setting_trial import KEEP, SettingTrial

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10
DEPLOYMENT_JOINED_TEXT = (
    "a deployment of this name runs already and is joined; its first supervisor accepts the "
    "control requests; choose another --deployment to separate them"
)


class ControlRequest(msgspec.Struct, frozen=True):
    """A request. `name` is a process or a kind of process, `count` the replicas to scale to.

    For `add` and `remove`, `name` is the URL of a server, `model` its model's name there,
    and `kv_events` the address of its KV events.
    For `add_adapter`, `name` is the adapter, `path` its folder and `model` what it adapts.
    For `add_model`, `entry` has the settings of an entry of `models` by key; `save` writes it into
    the settings file. For `alias`, `name` is the alias and `model` what it is to mean.
    For `try`, `entry` has settings by key: the least busy process of the kind `name` gets them. The
    first line of the answer is its instance id. A line `keep` within `count` seconds lets all
    others of its kind get them; any other line, and the end of the connection, take them back.
    """

    do: Literal[
        "scale",
        "drain",
        "restart",
        "add",
        "remove",
        "add_model",
        "add_adapter",
        "remove_model",
        "alias",
        "models",
        "report",
        "try",
    ]
    name: str
    count: int = 0
    model: str = ""
    kv_events: str = ""
    entry: dict[str, Any] = {}
    path: str = ""
    save: bool = False


class ControlProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer. The last line has `done` or `error`."""

    message: str = ""
    done: bool = False
    error: ErrorRecord | None = None


_encode = msgspec.json.Encoder().encode
GONE = _encode(
    ControlProgress(error=ErrorRecord(NotFound.code, "the deployment ended during the trial"))
)
"""The answer that a trial gets from a deployment that is gone."""
_decode_request = msgspec.json.Decoder(ControlRequest).decode
_decode_progress = msgspec.json.Decoder(ControlProgress).decode


class ControlServer:
    """Executes control requests in the supervisor."""

    def __init__(
        self,
        group: ProcessGroup,
        models: ServedModels,
        folder: Path,
        report: Callable[[str], Awaitable[str]],
    ) -> None:
        """`report` returns what `dynamo report` asks for."""
        self._group = group
        self._report = report
        self._trial = SettingTrial(group)
        self._models = models
        self._folder = folder
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, unless another supervisor of this deployment does. In that case the processes of
        this supervisor join the running deployment."""
        if _has_listener(self._folder):
            log.warning(DEPLOYMENT_JOINED_TEXT, extra={"fields": self._other_supervisor()})
            return
        self._server = await asyncio.start_unix_server(
            self._handle_connection, sock=_bind_control_socket(self._folder), limit=MAX_LINE_BYTES
        )

    async def refresh_socket(self) -> None:
        """Update the socket file's modification time, or listen again if the file was deleted."""
        if self._server is None:
            return
        try:
            os.utime(self._folder / CONTROL_SOCKET)
        except FileNotFoundError:
            self._server.close()
            self._server = None
            await self.start()

    async def stop(self) -> None:
        """Close the socket."""
        if self._server is not None:
            self._server.close()
            (self._folder / CONTROL_SOCKET).unlink(missing_ok=True)

    def _other_supervisor(self) -> dict[str, object]:
        deployment = Deployment(self._folder.name, self._folder)
        for record in deployment.live_processes():
            if record.role == "supervisor" and record.pid != os.getpid():
                return {"deployment": deployment.id, "pid": record.pid, "url": record.address}
        return {"deployment": deployment.id}

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        def send(progress: ControlProgress) -> None:
            writer.write(_encode(progress) + b"\n")

        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            try:
                request = _decode_request(await reader.readline())
                shown = msgspec.structs.replace(request, entry={})  # an entry may have secrets
                log.info("control request", extra={"fields": msgspec.to_builtins(shown)})
                await self._execute(request, lambda message: send(ControlProgress(message)), reader)
            except (msgspec.DecodeError, ValueError) as error:
                message = f"not a control request: {error}"
                send(ControlProgress(error=ErrorRecord(InvalidRequest.code, message)))
            except DynamoError as error:
                send(ControlProgress(error=ErrorRecord(error.code, error.message, error.hint)))
            else:
                send(ControlProgress(done=True))
            await writer.drain()

    async def _execute(
        self,
        request: ControlRequest,
        progress: ControlProgressCallback,
        reader: asyncio.StreamReader,
    ) -> None:
        if request.do == "scale":
            await self._group.scale(request.name, request.count, progress)
        elif request.do == "drain":
            await self._group.drain(request.name, progress)
        elif request.do == "add":
            await self._group.add_url(request.name, request.model, request.kv_events, progress)
        elif request.do == "remove":
            await self._group.remove_url(request.name, progress)
        elif request.do == "add_model":
            await self._models.add(request.entry, progress, save=request.save)
        elif request.do == "add_adapter":
            await self._models.add_adapter(
                request.name, request.path, request.model, progress, save=request.save
            )
        elif request.do == "remove_model":
            await self._models.remove(request.name, progress, save=request.save)
        elif request.do == "alias":
            await self._models.set_alias(request.name, request.model, progress, save=request.save)
        elif request.do == "try":
            limit_s, read = float(request.count), reader.readline
            await self._trial.run(request.name, request.entry, read, limit_s, progress)
        elif request.do == "report":
            progress(await self._report(request.name))
        elif request.do == "models":
            progress(msgspec.json.encode(self._models.statuses()).decode())
        else:
            await self._group.restart(request.name, progress)


def send_control_request(request: ControlRequest, folder: Path, timeout_s: float) -> Iterator[str]:
    """Send a request to the deployment with this state folder and yield its progress. Blocks.
    Raises the errors of the request, `NotFound` without a listening supervisor, and
    `TimeoutError`."""
    with socket.socket(socket.AF_UNIX) as connection, _short_socket_path(folder) as path:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError as error:
            raise _no_listener_error(folder, error) from None
        connection.sendall(_encode(request) + b"\n")
        for line in connection.makefile("rb"):
            message, done = _read_progress(line)
            if message:
                yield message
            if done:
                return
    raise NotFound(f"deployment {folder.name} ended before the request was complete")


async def start_control_request(request: ControlRequest, folder: Path, timeout_s: float) -> str:
    """Send a request and return its first progress, or "" if there is none within `timeout_s`. The
    deployment completes the request. Raises as `send_control_request`, for errors so far."""
    async with _requested(request, folder) as (reader, _):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if line := await reader.readline():
                    return _read_progress(line)[0]
    return ""


@contextlib.asynccontextmanager
async def _requested(
    request: ControlRequest, folder: Path
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send a request. Its connection is open during the block. Raises `NotFound`."""
    try:
        with _short_socket_path(folder) as path:
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
    except OSError as error:
        raise _no_listener_error(folder, error) from None
    with contextlib.closing(writer):
        writer.write(_encode(request) + b"\n")
        yield reader, writer


@contextlib.asynccontextmanager
async def trying(
    folder: Path, kind: str, values: Mapping[str, Any], limit_s: int
) -> AsyncIterator[RunningTrial]:
    """Let a process of the deployment with this state folder have other settings, which are
    taken back at the end unless they were kept. Raises the errors of the request."""
    request = ControlRequest("try", kind, limit_s, entry=dict(values))
    async with _requested(request, folder) as (reader, writer):
        instance, _ = _read_progress(await reader.readline() or GONE)
        yield RunningTrial(instance, reader, writer)


class RunningTrial(msgspec.Struct, frozen=True):
    """A trial, and the instance id of the process that has other settings."""

    instance: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def wait(self, seconds: float) -> None:
        """Return after `seconds`. Raises the error of a trial that ends before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                _read_progress(await self.reader.readline() or GONE)

    async def keep(self) -> str:
        """Let all processes of the kind have the settings. Returns when they do, or raises."""
        return await self._end(KEEP)

    async def take_back(self) -> None:
        """Return when the settings are taken back."""
        with contextlib.suppress(InvalidRequest):
            await self._end("")

    async def _end(self, verdict: str) -> str:
        self.writer.write(f"{verdict}\n".encode())
        message, done = "", False
        while not done:
            text, done = _read_progress(await self.reader.readline() or GONE)
            message = text or message
        return message


def _read_progress(line: bytes) -> tuple[str, bool]:
    """Return the message of a line of the answer, and whether it is the last. Raises the error."""
    progress = _decode_progress(line)
    if progress.error is not None:
        kind = error_types().get(progress.error.code, DynamoError)
        raise kind(progress.error.message, hint=progress.error.hint)
    return progress.message, progress.done


def _no_listener_error(folder: Path, error: OSError) -> NotFound:
    return NotFound(
        f"deployment {folder.name} accepts no control requests: {error.strerror}",
        hint="only deployments started by `dynamo run` or `dynamo serve` accept them",
    )


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
    """A path of the socket that fits into a socket address (108 bytes) for any folder."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{CONTROL_SOCKET}"
    finally:
        os.close(descriptor)
