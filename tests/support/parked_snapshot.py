"""A program that saves a snapshot and serves with it, by a driver that only keeps the process.

    parked_snapshot.py snapshot FOLDER MODEL FLAGS

Both commands run in this process, so that the saved process is its child before and after.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dynamo.cli import main
from dynamo.core.plugins import SNAPSHOT_DRIVERS
from dynamo.operations.snapshot.criu import Process

KEPT: list[Process] = []


class ParkedDriver:
    """Keeps the process and a writer of its standard input, as a restored process has both."""

    name = "parked"

    def check(self) -> None:
        """Works everywhere."""

    def save(self, process: Process, folder: Path) -> None:
        assert process.stdin is not None
        KEPT.append(process)
        writer = os.dup(process.stdin.fileno())
        (folder / "process").write_text(f"{process.pid} {writer}")

    def restore(self, folder: Path, stdin: str) -> tuple[int, int]:
        pid, writer = map(int, (folder / "process").read_text().split())
        if not stdin.startswith("pipe:") or KEPT[-1].returncode is not None:
            raise OSError("the process is gone")
        KEPT[-1].returncode = 0  # the server's owner waits for it
        return pid, writer


if __name__ == "__main__":
    _, command, folder, model, *flags = sys.argv
    SNAPSHOT_DRIVERS.builtin["parked"] = f"{__name__}:ParkedDriver"  # type: ignore[index]
    if code := main([command, "save", folder, model, "--driver", "parked"]):
        sys.exit(code)
    sys.exit(main([command, "load", folder, *flags]))
