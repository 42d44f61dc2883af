"""Writes the record of requests: JSON lines in the deployment's state folder.

Each process that serves clients appends to files of its own. The facts of requests are collected on
the event loop and become lines on a thread, once a second and all at once. Facts that cannot be
written are counted and dropped, so that a full disk costs requests nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.host.private_folders import make_private
from dynamo.core.settings.schema import RecordSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.deployment import state_roots
from dynamo.scheduling.request_record import SALT_BYTES, RecordMaker, RequestFacts, request_facts
from dynamo.telemetry import Registry
from dynamo.telemetry.story import Story

log = logging.getLogger(__name__)

RECORD_FOLDER = "record"
"""The name of the record in the state folder of a deployment."""
SALT_FILE = "salt"
SUFFIX = ".jsonl"
WRITE_INTERVAL_S = 1.0
MAX_PENDING = 20_000
"""Stories beyond so many that wait for the thread are lost."""
SEGMENTS = 16
"""A file is complete with this part of `record.max_bytes`, or after this part of `record.keep`, so
that old lines can be deleted."""
encode_lines = msgspec.json.Encoder().encode_lines


class RecordFiles:
    """The files of one process in the folder of a record. Methods block and run on one thread.
    `folder` is called, and may raise `OSError`, when the first line is written."""

    def __init__(
        self, folder: Callable[[], Path], name: str, settings: RecordSettings, clock: Clock
    ) -> None:
        self._make_folder = folder
        self._folder: Path
        self._name = name
        self._settings = settings
        self._clock = clock
        self._segment = self._size = 0
        self._file, self._opened_s = -1, 0.0
        self._maker: RecordMaker | None = None

    def write(self, requests: Sequence[RequestFacts]) -> None:
        """Append a line for each request. Raises `OSError` if none of them could be written."""
        if self._maker is None or not self._folder.exists():
            folder = self._make_folder()
            make_private(folder)
            self._folder, self._maker = folder, RecordMaker(_read_salt(folder / SALT_FILE))
        self._append(encode_lines(list(map(self._maker.make, requests))))

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, lines: bytes) -> None:
        if self._is_complete():
            self._open_next()
        written = os.write(self._file, lines)
        if written < len(lines):  # the disk is full: leave no part of a line
            os.ftruncate(self._file, self._size)
            raise OSError(f"{written} of {len(lines)} bytes were written")
        self._size += written

    def _is_complete(self) -> bool:
        """Return whether lines go to another file; also where somebody has deleted this one."""
        settings = self._settings
        return (
            self._file < 0
            or self._size >= settings.max_bytes // SEGMENTS
            or self._clock.wall() - self._opened_s >= settings.keep / SEGMENTS
            or not os.fstat(self._file).st_nlink
        )

    def _open_next(self) -> None:
        self.close()
        self._prune()
        self._opened_s = self._clock.wall()
        self._segment += 1
        path = self._folder / f"{self._name}-{self._segment:05}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def _prune(self) -> None:
        """Delete files that are too old, and the oldest beyond the size that is left for all."""
        total = 0
        oldest_s = self._clock.wall() - self._settings.keep
        most = self._settings.max_bytes * (SEGMENTS - 1) // SEGMENTS
        for modified_s, size, path in sorted(_list_files(self._folder), reverse=True):
            total += size
            if total > most or modified_s < oldest_s:
                path.unlink(missing_ok=True)


class RequestRecorder:
    """Records the stories that it receives (a `StoryListener`)."""

    def __init__(self, files: RecordFiles, clock: Clock, metrics: Registry) -> None:
        self._files = files
        self._clock = clock
        self._pending: list[RequestFacts] = []
        self._arrived = asyncio.Event()
        self._failing = False
        self._recorded = metrics.counter(
            "dynamo_record_requests_total", "Requests in the record of requests"
        )
        self._lost = metrics.counter(
            "dynamo_record_lost_total", "Requests that the record of requests lacks"
        )
        self._tasks = BackgroundTasks()

    def start(self) -> None:
        """Write in the background."""
        self._tasks.start(self._run(), "record of requests")

    def add(self, stories: Sequence[Story]) -> None:
        """Record stories soon."""
        pending = self._pending
        self._arrived.set()
        if len(pending) + len(stories) > MAX_PENDING:
            self._lost.inc(len(stories))
            return
        pending.extend(map(request_facts, stories))

    async def close(self) -> None:
        """Write what is pending."""
        await self._tasks.close()
        await self._write_pending()
        await self._clock.offload(self._files.close)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._clock.sleep(WRITE_INTERVAL_S)
            await self._write_pending()

    async def _write_pending(self) -> None:
        requests, self._pending = self._pending, []
        self._arrived.clear()
        if not requests:
            return
        try:
            await self._clock.offload(self._files.write, requests)
        except Exception as error:  # noqa: BLE001 - a record must never end a frontend
            self._lost.inc(len(requests))
            if not self._failing:
                self._failing = True
                log.warning("requests cannot be recorded", extra={"fields": {"error": str(error)}})
        else:
            self._failing = False
            self._recorded.inc(len(requests))


def find_record(name: str) -> Path | None:
    """Return the folder with the record of a deployment on this host, which need not run. `name`:
    its name or its HTTP port; "" finds the record that was written last. Blocks."""
    folders = [path for root in state_roots() for path in root.glob(f"*/{RECORD_FOLDER}")]
    if name:
        names = (name, f"http-{name}")
        return next((path for path in folders if path.parent.name in names), None)
    return max(folders, key=_last_write_s, default=None)


def locate_trace(name: str) -> str:
    """Return the path of a trace: the file or folder of that name, else the record of the
    deployment. Blocks."""
    folder = None if Path(name).exists() else find_record(name)
    return name if folder is None else str(folder)


def _last_write_s(folder: Path) -> float:
    return max((modified_s for modified_s, *_ in _list_files(folder)), default=0.0)


def _list_files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each file of a record was written last, its size and its path."""
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            status = path.stat()
        except FileNotFoundError:  # another process has deleted it
            continue
        yield status.st_mtime, status.st_size, path


def _read_salt(path: Path) -> bytes:
    """Return the salt of a record, made by the first process that needs it. Raises `OSError`."""
    if not path.exists():
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.touch(mode=0o600)
        own.write_bytes(os.urandom(SALT_BYTES))
        try:
            os.link(own, path)
        except FileExistsError:
            log.debug("another process has made the salt of the record")
        finally:
            own.unlink()
    return path.read_bytes()
