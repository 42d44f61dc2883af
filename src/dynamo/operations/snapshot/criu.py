"""CRIU as a driver of snapshots: it writes a process to files, and makes a process of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from dynamo.core.errors import ConfigError

TIMEOUT_S = 600.0
PLACES = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Folders of programs for administrators, which are often not in $PATH."""
OPTIONS = ("--manage-cgroups=ignore", "--log-file", "criu.log", "-v2")
INSTALL_HINT = "install CRIU 4 or later (https://criu.org/Packages), or use `dynamo run`"
RIGHTS_HINT = "run this command as root, or give CRIU the capability CAP_CHECKPOINT_RESTORE"
Process = subprocess.Popen[bytes]


class SnapshotDriver(Protocol):
    """Saves a process, which has one thread, no sockets and a pipe as standard input."""

    name: str

    def check(self) -> None:
        """Raise `ConfigError` if the driver cannot be used here."""

    def save(self, process: Process, folder: Path) -> None:
        """Write a process to an empty folder, and let it end. Raises `OSError`."""

    def restore(self, folder: Path, stdin: str) -> tuple[int, int]:
        """Make a child of this process, which adopts orphans, of a folder; see `Restore`. `stdin`
        is the pipe that the saved process had, as /proc names it. Raises `OSError`."""


class Criu:
    """The program `criu`."""

    name = "criu"

    def check(self) -> None:
        """Run `criu check`. Raises `ConfigError`."""
        try:
            _run("check")
        except OSError as error:
            text = str(error)
            lacks_rights = "CAP_" in text or "ermission" in text
            reason = f"CRIU has no right to save processes: user {os.geteuid()}"
            raise ConfigError(
                reason if lacks_rights else f"CRIU cannot be used: {text}",
                hint=RIGHTS_HINT if lacks_rights else INSTALL_HINT,
            ) from None

    def save(self, process: Process, folder: Path) -> None:
        _run("dump", "--tree", str(process.pid), *OPTIONS, "--images-dir", str(folder))
        process.wait()
        for clocks in folder.glob("timens-*.img"):  # else it has clocks of its own later
            clocks.unlink()

    def restore(self, folder: Path, stdin: str) -> tuple[int, int]:
        reader, writer = os.pipe()
        with tempfile.TemporaryDirectory(prefix="dynamo-restore-") as work:
            pid_file = Path(work, "pid")
            try:
                _run(
                    *("restore", "--restore-detached", "--pidfile", str(pid_file), *OPTIONS),
                    *("--inherit-fd", f"fd[{reader}]:{stdin}"),
                    *("--images-dir", str(folder), "--work-dir", work),
                    pass_fds=(reader,),
                )
                return int(pid_file.read_text()), writer
            except BaseException:
                os.close(writer)
                raise
            finally:
                os.close(reader)


def _run(*arguments: str, pass_fds: Sequence[int] = ()) -> None:
    """Run CRIU. Raises `OSError` with the last line that it wrote."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *PLACES))
    if (program := shutil.which("criu", path=path)) is None:
        raise FileNotFoundError("the program criu is not installed")
    try:
        result = subprocess.run(  # noqa: S603 - our own arguments
            [program, *arguments],
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"criu {arguments[0]} took more than {TIMEOUT_S:g} s") from None
    if result.returncode:
        raise OSError(_last_error(arguments, result.stdout + result.stderr))


def _last_error(arguments: Sequence[str], output: str) -> str:
    """Return the last error of the log, without its place in CRIU's source, or of the output."""
    options = dict(pairwise(arguments))
    folder = options.get("--work-dir", options.get("--images-dir", ""))
    log = Path(folder, "criu.log")
    if folder and log.exists():
        output += log.read_text(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error (" in line and "rlimit" not in line]
    causes = [line.split("): ", 1)[-1] for line in errors if "failed" not in line.lower()]
    if any("File exists" in line for line in causes):
        return "another process has its process id: stop that one, or save again"
    return (causes or errors or lines or [f"criu {arguments[0]} failed"])[-1]
