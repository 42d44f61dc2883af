"""Deployments of this user on this host: state folders and records of their processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.host.pids import is_alive, is_stopped
from dynamo.core.host.private_folders import close_to_others, foreign_reason, make_private

if TYPE_CHECKING:
    from dynamo.communication.discovery.disk_reserve import DiskReserve
    from dynamo.core.settings import Settings

log = logging.getLogger(__name__)

ProcessState = Literal["starting", "standby", "ready", "sleeping", "draining", "hung", "restarting"]
"""A process reports its state itself, except for `hung`: its supervisor reports that, and readers
of its record find a process that is stopped (SIGSTOP). `restarting` is a dead one whose restart its
supervisor waits for. `standby`: it has loaded its model and takes the place of a dead one.
`sleeping`: a worker that gave its memory back and serves again when it is woken."""
RECORDS_FOLDER = "processes"
DISCOVERY_FOLDER = "discovery"
CONTROL_SOCKET = "control"
"""The file name of the control socket (`runtime.processes.control`)."""
STATE_FOLDER_HINT = "set XDG_RUNTIME_DIR to a writable folder of your own on a disk with free space"
STATE_ROOT_VARIABLE = "_DYNAMO_STATE_ROOT"
"""Environment variable by which a supervisor tells its children the root of its state folder."""

_NOT_IN_INSTANCE_ID = re.compile(r"[^A-Za-z0-9_-]+")
_DEPLOYMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def new_instance_id(process_name: str) -> str:
    """Return the id of a new process: `worker-2-3f9a1c42d0` for `worker-2`. The id is a part of
    discovery keys and HTTP headers."""
    return f"{_NOT_IN_INSTANCE_ID.sub('-', process_name)}-{secrets.token_hex(5)}"


class ChildStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The view that a supervisor has of a process: whether its event loop hangs, and how many
    processes of its name died before it."""

    hung: bool = False
    restarts: int = 0


class WaitingChild(msgspec.Struct, frozen=True):
    """A process of a supervisor that died and is not started again yet, and its last exit."""

    role: str
    restarts: int
    reason: str


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a live process, as `dynamo ps` shows it. `model` is the model of a worker.
    `address` is the address on the request plane or the HTTP URL. `start_ticks` distinguishes the
    process from a later one with the same pid. `children` are the unusual children of a supervisor
    by pid, `waiting` those without a process by name. `restarts` is added by readers from there.
    `cards_by_name`: the accelerators of a supervisor's workers, which readers add to these as
    `cards`. `reason` says why the process is not healthy, or is empty. `shared_bytes` is the memory
    that the children of a supervisor share, such as weights."""

    deployment: str
    role: str
    name: str
    pid: int
    namespace: str = ""
    engine: str = ""
    model: str = ""
    address: str = ""
    status_url: str = ""
    state: ProcessState = "starting"
    instance: str = ""
    start_ticks: int = 0
    restarts: int = 0
    reason: str = ""
    children: dict[int, ChildStatus] = {}
    waiting: dict[str, WaitingChild] = {}
    cards: str = ""
    cards_by_name: dict[str, tuple[str, ...]] = {}
    shared_bytes: int = 0


class Deployment(msgspec.Struct, frozen=True):
    """A deployment on this host and its state folder (mode 0700)."""

    id: str
    folder: Path

    @property
    def discovery_url(self) -> str:
        """The `file:` discovery plane of its processes."""
        return f"file:{self.folder / DISCOVERY_FOLDER}"

    @property
    def reserve(self) -> DiskReserve:
        """The disk space that its processes use for their records when the disk is full."""
        from dynamo.communication.discovery.disk_reserve import RESERVE_FOLDER, DiskReserve

        return DiskReserve(self.folder / DISCOVERY_FOLDER / RESERVE_FOLDER)

    def create_folder(self) -> None:
        """Create the folder. Blocks. Raises `ConfigError` if the folder cannot be created or
        belongs to another user."""
        _ensure_private(self.folder.parent)
        _ensure_private(self.folder)
        _ensure_private(self.folder / RECORDS_FOLDER)

    def write_record(self, record: ProcessRecord) -> None:
        """Write or replace a record atomically, and create the folder if it is missing. Blocks.
        Raises `ConfigError` if the folder is not writable."""
        path = self._record_path(record.instance)
        temporary = path.with_suffix(".new")
        with self._lock(fcntl.LOCK_SH):
            self.create_folder()
            try:
                self.reserve.write_file(temporary, msgspec.json.encode(record))
                temporary.replace(path)
            except OSError as error:
                message = f"the state folder {self.folder} cannot be written: {error.strerror}"
                raise ConfigError(message, hint=STATE_FOLDER_HINT) from None

    def refresh_record(self, record: ProcessRecord) -> None:
        """Write a record again if it was deleted, otherwise update its modification time. Blocks.
        The system deletes /run/user with the user's last session and old files in /tmp."""
        try:
            os.utime(self._record_path(record.instance))
        except FileNotFoundError:
            self.write_record(record)

    def remove_record(self, record: ProcessRecord) -> None:
        """Delete the record of a process. Blocks."""
        self._record_path(record.instance).unlink(missing_ok=True)

    def remove_if_unused(self) -> None:
        """Remove the folder and the files of killed processes, if no process is alive. Blocks."""
        with contextlib.suppress(OSError), self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            if self.live_processes():  # also removes the records of killed processes
                return
            folders = [self.folder / name for name in (RECORDS_FOLDER, DISCOVERY_FOLDER)]
            if not any(folder.exists() for folder in folders):
                self.folder.rmdir()  # fails if there are counts of requests or answers
                return
            from dynamo.communication.discovery.folder import remove_dead_leases
            from dynamo.communication.discovery.folder_secret import remove_unused_secret

            remove_dead_leases(self.folder / DISCOVERY_FOLDER)
            remove_unused_secret(self.folder / DISCOVERY_FOLDER)
            self.reserve.remove()
            for temporary in (self.folder / RECORDS_FOLDER).glob("*.new"):
                temporary.unlink()
            (self.folder / CONTROL_SOCKET).unlink(missing_ok=True)
            for name in (RECORDS_FOLDER, DISCOVERY_FOLDER, ""):
                with contextlib.suppress(OSError):  # missing or not empty
                    (self.folder / name).rmdir()

    def live_processes(self) -> Sequence[ProcessRecord]:
        """Live processes: supervisors first, then by role and name, with the status that their
        supervisors report. Blocks. Records of dead processes are removed."""
        records = [
            record
            for path in self.folder.glob(f"{RECORDS_FOLDER}/*.json")
            if (record := _read_live_record(path))
        ]
        records.sort(key=lambda record: (record.role != "supervisor", record.role, record.name))
        return _add_child_status(records)

    @contextlib.contextmanager
    def _lock(self, operation: int) -> Iterator[None]:
        """Lock the parent folder, so that no folder is removed while a record is written to it."""
        root = self.folder.parent
        _ensure_private(root)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, operation)
            yield
        finally:
            os.close(descriptor)

    def _record_path(self, instance: str) -> Path:
        return self.folder / RECORDS_FOLDER / f"{instance}.json"


def deployment_of(settings: Settings, environ: Mapping[str, str] = os.environ) -> Deployment:
    """The deployment of a process with these settings. Raises `ConfigError`."""
    name = settings.runtime.deployment or f"http-{settings.server.http_port}"
    if not _DEPLOYMENT_NAME.match(name):
        raise ConfigError(
            f"{name!r} is not a valid name of a deployment",
            hint="use letters, digits, dots, underscores and dashes, with a letter or digit first",
            param="runtime.deployment",
        )
    roots, unsafe = _sort_roots(environ)
    if not roots:
        reasons = "; ".join(f"{root} {reason}" for root, reason in unsafe.items())
        raise ConfigError(f"no folder can hold the state: {reasons}", hint=STATE_FOLDER_HINT)
    return Deployment(name, roots[0] / name)


def state_roots(environ: Mapping[str, str] = os.environ) -> Sequence[Path]:
    """The folders that may hold deployments of this user; new deployments go to the first. A folder
    that another user could read, change or replace is left out (`report_unsafe_roots`)."""
    return _sort_roots(environ)[0]


def report_unsafe_roots(environ: Mapping[str, str] = os.environ) -> None:
    """Log each state root that is left out, once in the life of the process."""
    for root, reason in _sort_roots(environ)[1].items():
        if (root, reason) not in _reported_roots:
            _reported_roots.add((root, reason))
            log.warning("the state folder %s is ignored: it %s", root, reason)


REPLACEABLE = "could be replaced by other users, who can write to its parent folder"
_TEMPORARY_FOLDER = Path("/tmp")  # noqa: S108 - `_unsafe_reason` checks what is in it
"""The same for all shells of a user, so that each finds the deployments, unlike $TMPDIR."""
_reported_roots: set[tuple[Path, str]] = set()


def _candidate_roots(environ: Mapping[str, str]) -> Sequence[Path]:
    roots = [_TEMPORARY_FOLDER / f"dynamo-{os.getuid()}"]
    if base := environ.get("XDG_RUNTIME_DIR"):
        roots.insert(0, Path(base) / "dynamo")
    if supervisor_root := environ.get(STATE_ROOT_VARIABLE):
        roots.insert(0, Path(supervisor_root))
    with contextlib.suppress(RuntimeError):  # a user without a home
        roots.append(Path.home() / ".cache/dynamo/run")
    return list(dict.fromkeys(roots))


def _sort_roots(environ: Mapping[str, str]) -> tuple[Sequence[Path], Mapping[Path, str]]:
    """Return the roots to use, and for each other root why it is left out. Without a safe root, as
    in some containers, roots that others could only replace as a whole are used."""
    reasons = {root: _unsafe_reason(root) for root in _candidate_roots(environ)}
    for accepted in ("", REPLACEABLE):
        if roots := [root for root, reason in reasons.items() if reason == accepted]:
            break
    better = list(reasons).index(roots[0]) if roots else len(reasons)
    return roots, {
        root: reason
        for position, (root, reason) in enumerate(reasons.items())
        if root not in roots and (position < better or os.path.lexists(root))
    }


def _unsafe_reason(root: Path) -> str:
    """Return why a state root must not be used, or an empty string. A root of this user that is
    open to others is closed to them. A root that does not exist yet may be used if this user can
    create it where no other user can replace it."""
    try:
        if reason := foreign_reason(root.lstat()):
            return reason
        close_to_others(root)
        parent = root.parent
    except FileNotFoundError:
        parent = next(folder for folder in root.parents if folder.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return f"cannot be created in {parent}"
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    status = parent.stat()
    replaceable = status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX
    if replaceable or status.st_uid not in {0, os.getuid()}:
        return REPLACEABLE
    return ""


def live_deployments(environ: Mapping[str, str] = os.environ) -> Sequence[Deployment]:
    """The deployments of this user with live processes; folders of others are removed. Blocks. Of
    several with the same name, that of the first state root has the name as id, the others have
    their folders."""
    return [deployment for deployment, _ in _with_live_processes(environ)]


def live_processes(environ: Mapping[str, str] = os.environ) -> Sequence[ProcessRecord]:
    """The live processes of all `live_deployments`, with the ids of these. Blocks."""
    return [
        msgspec.structs.replace(record, deployment=deployment.id)
        for deployment, records in _with_live_processes(environ)
        for record in records
    ]


def _with_live_processes(
    environ: Mapping[str, str],
) -> Iterator[tuple[Deployment, Sequence[ProcessRecord]]]:
    names: set[str] = set()
    for deployment in _list_deployments(environ):
        if records := deployment.live_processes():
            unique = deployment.id if deployment.id not in names else str(deployment.folder)
            names.add(deployment.id)
            yield Deployment(unique, deployment.folder), records
        else:
            deployment.remove_if_unused()


def _list_deployments(environ: Mapping[str, str]) -> Iterator[Deployment]:
    report_unsafe_roots(environ)
    for root in state_roots(environ):
        with contextlib.suppress(OSError):
            for folder in sorted(root.iterdir()):
                if not foreign_reason(folder.lstat()):
                    yield Deployment(folder.name, folder)


def _read_live_record(path: Path) -> ProcessRecord | None:
    """Read the record of a live process; the record of a dead process is deleted. A record that
    another user wrote while the folder was open to others is left out."""
    try:
        if path.lstat().st_uid != os.getuid():
            return None
        record = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("bad process record", extra={"fields": {"path": path, "error": str(error)}})
        return None
    if is_alive(record.pid, record.start_ticks):
        return msgspec.structs.replace(record, state="hung") if is_stopped(record.pid) else record
    path.unlink(missing_ok=True)
    return None


def _add_child_status(records: Sequence[ProcessRecord]) -> Sequence[ProcessRecord]:
    """Add what supervisors report about their children to the records of these."""
    children = {pid: status for record in records for pid, status in record.children.items()}
    cards = {name: own for record in records for name, own in record.cards_by_name.items()}
    if cards:
        records = [
            msgspec.structs.replace(record, cards=",".join(cards.get(record.name, ())))
            for record in records
        ]
    return [
        msgspec.structs.replace(
            record, state="hung" if status.hung else record.state, restarts=status.restarts
        )
        if (status := children.get(record.pid))
        else record
        for record in records
    ]


def add_waiting_children(records: Sequence[ProcessRecord]) -> Sequence[ProcessRecord]:
    """Add a record with pid 0 after the others for each process that waits for its restart."""
    live = {(record.deployment, record.name) for record in records}
    return [
        *records,
        *(
            ProcessRecord(
                deployment=supervisor.deployment,
                role=child.role,
                name=name,
                pid=0,
                namespace=supervisor.namespace,
                state="restarting",
                restarts=child.restarts,
                reason=child.reason,
            )
            for supervisor in records
            for name, child in supervisor.waiting.items()
            if (supervisor.deployment, name) not in live
        ),
    ]


def _ensure_private(folder: Path) -> None:
    """Create `folder` and make it private. Raises `ConfigError` if another user owns it."""
    try:
        make_private(folder)
        if reason := foreign_reason(folder.lstat()):
            raise ConfigError(f"the state folder {folder} {reason}", hint=STATE_FOLDER_HINT)
        close_to_others(folder)
    except OSError as error:
        message = f"the state folder {folder} cannot be created: {error.strerror}"
        raise ConfigError(message, hint=STATE_FOLDER_HINT) from None
