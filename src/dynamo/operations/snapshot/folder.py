"""The folder of a snapshot: a driver's files, and `snapshot.json`, which says what they fit to."""

from __future__ import annotations

import hashlib
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dynamo import __version__
from dynamo.core.errors import DECODE_ERRORS, ConfigError, ModelUnavailable
from dynamo.core.host.private_folders import make_private
from dynamo.core.plugins import SNAPSHOT_DRIVERS
from dynamo.core.settings import Settings
from dynamo.inference.engines.compile_cache import cpu_features
from dynamo.models.file_cache import write_atomically
from dynamo.operations.snapshot.criu import SnapshotDriver
from dynamo.runtime.processes.fork_server import Restore

MANIFEST = "snapshot.json"
COMMAND = (sys.executable, "-P", "-m", "dynamo", "_child", "worker", "--snapshot")
KEPT_VARIABLES = ("HOME", "PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
KEPT_PREFIXES = ("XDG_", "PYTHON", "OPENBLAS_", "OMP_", "MKL_", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables of a saved process. Others may be secrets."""
SAVED_SECTIONS = ("model", "engine", "cache")
"""Sections of the settings that decide how a model is loaded."""
IDENTITY = ("model.path", "engine.kind")
"""Settings that a snapshot always has."""
MIN_PID_SHARE = 0.5
OTHERS_WRITE = 0o022
HINT = "save one with `dynamo snapshot save FOLDER`"


class SnapshotManifest(msgspec.Struct, frozen=True):
    """The facts of a snapshot. `settings` are those other than the defaults, by key. `stdin` is the
    pipe that the process had as standard input. `versions` and `cpu` are those of the host."""

    driver: str
    stdin: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    cpu: str


class PreloadAnswer(msgspec.Struct, frozen=True):
    """The message of a process that has loaded its model, or that could not."""

    error: str = ""
    hint: str = ""


def save_snapshot(
    folder: Path, settings: Settings, driver: str, fetch: Callable[[], object] = lambda: None
) -> SnapshotManifest:
    """Start a process, let it load the model of `settings`, and save it to a new folder. `fetch`
    gets the model, once nothing else is missing. Raises `ConfigError`, and `ModelUnavailable` with
    the reason of the driver or of the process."""
    saver: SnapshotDriver = SNAPSHOT_DRIVERS.load(driver)()
    saver.check()
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", hint="name another place")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", hint="name another folder, or delete it")
    fetch()
    make_private(folder.parent)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _loaded_process(settings) as process:
            stdin = str(Path(f"/proc/{process.pid}/fd/0").readlink())
            try:
                saver.save(process, part)
            except OSError as error:
                raise ModelUnavailable(f"{driver} does not save the process: {error}") from error
        manifest = SnapshotManifest(
            driver, stdin, _changed_settings(settings), _versions(), cpu_features()
        )
        write_atomically(part / MANIFEST, msgspec.json.encode(manifest))
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return manifest


def read_snapshot(folder: Path) -> tuple[SnapshotManifest, Restore]:
    """Return the manifest of a snapshot that fits to this host and package, and what restores it.
    Raises `ConfigError`, also for a folder that other users can change: its files become processes
    with the rights of this one."""
    try:
        status = folder.stat()
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & OTHERS_WRITE:
            facts = f"it belongs to user {status.st_uid}, mode {status.st_mode & 0o777:o}"
            raise ConfigError(f"other users can change {folder}: {facts}", hint=HINT)
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=SnapshotManifest)
    except OSError as error:
        raise ConfigError(f"{folder} is no snapshot: {error.strerror}", hint=HINT) from None
    except DECODE_ERRORS as error:
        raise ConfigError(f"{folder} is no snapshot of this version: {error}", hint=HINT) from None
    for name, version in _versions().items():
        if (saved := manifest.versions.get(name)) != version:
            raise ConfigError(f"{folder} was saved with {name} {saved}, not {version}", hint=HINT)
    if manifest.cpu != cpu_features():
        raise ConfigError(f"{folder} was saved on a processor with other features", hint=HINT)
    driver: SnapshotDriver = SNAPSHOT_DRIVERS.load(manifest.driver)()
    driver.check()
    return manifest, partial(driver.restore, folder, manifest.stdin)


def _changed_settings(settings: Settings) -> Mapping[str, Any]:
    changed: dict[str, Any] = {}
    for section in SAVED_SECTIONS:
        values, defaults = getattr(settings, section), getattr(Settings(), section)
        for name in values.__struct_fields__:
            key, value = f"{section}.{name}", getattr(values, name)
            if key in IDENTITY or value != getattr(defaults, name):
                changed[key] = msgspec.to_builtins(value)
    return changed


def _versions() -> Mapping[str, str]:
    """Return the versions that a saved process depends on. A hash stands for the source of this
    package, which may change without its version."""
    package = Path(__file__).parents[2]
    source = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source.update(f"{path.relative_to(package)}\0".encode())
        source.update(path.read_bytes())
    return {
        "dynamo": f"{__version__} ({source.hexdigest()[:12]})",
        "Python": sys.version.split()[0],
        "kernel": platform.release(),
    }


@contextmanager
def _loaded_process(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that has loaded the model and waits to be saved. An exception kills it."""
    chosen = msgspec.structs.replace(
        Settings(), **{name: getattr(settings, name) for name in SAVED_SECTIONS}
    )
    environ = {
        name: text
        for name, text in os.environ.items()
        if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)
    }
    _skip_process_ids()
    process = subprocess.Popen(  # noqa: S603 - our own command
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=environ,
    )
    assert process.stdin is not None  # noqa: S101 - a pipe
    assert process.stdout is not None  # noqa: S101 - a pipe
    with process.stdin, process.stdout:
        try:
            process.stdin.write(msgspec.json.encode(chosen) + b"\n")
            process.stdin.flush()
            _check_answer(process.stdout.read())
            yield process
        except BaseException:
            process.kill()
            process.wait()
            raise


def _check_answer(line: bytes) -> None:
    if not line:
        raise ModelUnavailable("the process ended before it had loaded the model")
    answer = msgspec.json.decode(line, type=PreloadAnswer)
    if answer.error:
        raise ModelUnavailable(answer.error, hint=answer.hint)


def _skip_process_ids() -> None:
    """Let the next process get a process id that others rarely have, since a restored process has
    that of the saved one. Does nothing without the right to."""
    with suppress(OSError, ValueError):
        limit = int(Path("/proc/sys/kernel/pid_max").read_text())
        pid = random.randrange(int(limit * MIN_PID_SHARE), limit - 1)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid))
