"""Deployments of this user on this host: state folders, and who lives in them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.runtime.pids import is_alive

if TYPE_CHECKING:
    from dynamo.core.settings import Settings

log = logging.getLogger(__name__)

ProcessState = Literal["starting", "ready", "draining"]
RECORDS_FOLDER = "processes"
DISCOVERY_FOLDER = "discovery"
CONTROL_SOCKET = "control"
"""The socket that takes orders (`runtime.control`)."""
STATE_FOLDER_HINT = "set XDG_RUNTIME_DIR to a folder of your own, with room"

_DEPLOYMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One live process, as `dynamo ps` shows it. `address`: what it serves (request plane or HTTP
    URL); `start_ticks` makes a reused pid another process."""

    deployment: str
    role: str
    name: str
    pid: int
    address: str = ""
    status_url: str = ""
    state: ProcessState = "starting"
    instance: str = ""
    start_ticks: int = 0


def process_record_key(record: ProcessRecord) -> str:
    """Where a process record stands in discovery."""
    return f"/_processes/{record.role}/{record.instance}"


class Deployment(msgspec.Struct, frozen=True):
    """One deployment on this host and its state folder (mode 0700)."""

    id: str
    folder: Path

    @property
    def discovery_url(self) -> str:
        """The `file:` discovery plane of its processes."""
        return f"file:{self.folder / DISCOVERY_FOLDER}"

    def create_folder(self) -> None:
        """Make the folder. Raises `ConfigError` where it cannot be made or is somebody else's.
        Blocks."""
        _ensure_private(self.folder.parent)
        _ensure_private(self.folder)
        _ensure_private(self.folder / RECORDS_FOLDER)

    def write_record(self, record: ProcessRecord) -> None:
        """Write or replace a process's record, at once or not at all; makes the folder where
        `clear` took it. Raises `ConfigError` where that cannot be. Blocks."""
        path = self._record_path(record.instance)
        fresh = path.with_suffix(".new")
        with self._lock(fcntl.LOCK_SH):
            self.create_folder()
            try:
                fresh.write_bytes(msgspec.json.encode(record))
                fresh.replace(path)
            except OSError as error:
                message = f"the state folder {self.folder} cannot be written: {error.strerror}"
                raise ConfigError(message, hint=STATE_FOLDER_HINT) from None

    def refresh_record(self, record: ProcessRecord) -> None:
        """Write a living process's record again where somebody took it away (/run/user goes with
        its user's last session), and keep it young for who clears /tmp by age. Blocks."""
        try:
            os.utime(self._record_path(record.instance))
        except FileNotFoundError:
            self.write_record(record)

    def remove_record(self, record: ProcessRecord) -> None:
        """Forget a process. Blocks."""
        self._record_path(record.instance).unlink(missing_ok=True)

    def remove_if_unused(self) -> None:
        """Remove the folder, and what the killed left in it, if nobody lives there. Blocks."""
        with contextlib.suppress(OSError), self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            if self.live_processes():  # which removes the records of the killed
                return
            from dynamo.communication.discovery.folder import remove_dead_leases

            remove_dead_leases(self.folder / DISCOVERY_FOLDER)
            for part in (self.folder / RECORDS_FOLDER).glob("*.new"):
                part.unlink()
            (self.folder / CONTROL_SOCKET).unlink(missing_ok=True)
            for folder in (
                self.folder / RECORDS_FOLDER,
                self.folder / DISCOVERY_FOLDER,
                self.folder,
            ):
                with contextlib.suppress(OSError):  # not there, or not empty
                    folder.rmdir()

    def live_processes(self) -> Sequence[ProcessRecord]:
        """Live processes, supervisor first, then by role and name; records of dead ones are
        removed. Blocks."""
        found = [
            record
            for path in self.folder.glob(f"{RECORDS_FOLDER}/*.json")
            if (record := _read_live_record(path))
        ]
        return sorted(found, key=lambda one: (one.role != "supervisor", one.role, one.name))

    @contextlib.contextmanager
    def _lock(self, how: int) -> Iterator[None]:
        """Nobody clears while somebody writes: a record stands in a folder that stays."""
        root = self.folder.parent
        _ensure_private(root)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    def _record_path(self, instance: str) -> Path:
        return self.folder / RECORDS_FOLDER / f"{instance}.json"


def deployment_of(settings: Settings, environ: Mapping[str, str] = os.environ) -> Deployment:
    """The deployment that a process with these settings belongs to. Raises `ConfigError`."""
    name = settings.runtime.deployment or f"http-{settings.server.http_port}"
    if not _DEPLOYMENT_NAME.match(name):
        raise ConfigError(
            f"{name!r} is no name for a deployment",
            hint="letters, digits, dots and dashes",
            param="runtime.deployment",
        )
    return Deployment(name, next(state_roots(environ)) / name)


def state_roots(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Where deployments of this user may lie; the first is where new ones go."""
    if base := environ.get("XDG_RUNTIME_DIR"):
        yield Path(base) / "dynamo"
    yield Path("/tmp") / f"dynamo-{os.getuid()}"  # noqa: S108 - made 0700, owner checked


def live_deployments(environ: Mapping[str, str] = os.environ) -> Sequence[Deployment]:
    """Every deployment of this user that has a live process; of others the folder is removed.
    Blocks."""
    return [one for one, _ in _with_live_processes(environ)]


def live_processes(environ: Mapping[str, str] = os.environ) -> Sequence[ProcessRecord]:
    """Every live process of every deployment of this user; as `live_deployments`. Blocks."""
    return [record for _, records in _with_live_processes(environ) for record in records]


def _with_live_processes(
    environ: Mapping[str, str],
) -> Iterator[tuple[Deployment, Sequence[ProcessRecord]]]:
    for one in _list_deployments(environ):
        if records := one.live_processes():
            yield one, records
        else:
            one.remove_if_unused()


def _list_deployments(environ: Mapping[str, str]) -> Iterator[Deployment]:
    for root in state_roots(environ):
        with contextlib.suppress(OSError):
            for folder in sorted(root.iterdir()):
                if folder.is_dir() and folder.stat().st_uid == os.getuid():
                    yield Deployment(folder.name, folder)


def _read_live_record(path: Path) -> ProcessRecord | None:
    """The live process of one record file; a dead one's file is removed."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("bad process record", extra={"fields": {"path": path, "error": str(error)}})
        return None
    if is_alive(record.pid, record.start_ticks):
        return record
    path.unlink(missing_ok=True)
    return None


def _ensure_private(folder: Path) -> None:
    """`folder` exists, is ours and nobody else can look into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        message = f"the state folder {folder} cannot be made: {error.strerror}"
        raise ConfigError(message, hint=STATE_FOLDER_HINT) from None
    about = folder.stat(follow_symlinks=False)
    if about.st_uid != os.getuid():
        raise ConfigError(
            f"the state folder {folder} belongs to another user", hint=STATE_FOLDER_HINT
        )
    if about.st_mode & 0o077:
        folder.chmod(0o700)
