"""The parent death signal, for children that must not outlive their parent.

This file is also a program, `PID COMMAND...`: it becomes the command, which dies with process PID.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Constants of linux/prctl.h."""


def set_parent_death_signal() -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(adopts: bool) -> None:
    """Let this process become the parent of descendants whose parent ends, or no more."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line for a foreign program that must not outlive this process. The thread
    that starts the program must wait for its end."""
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    set_parent_death_signal()
    if os.getppid() == int(sys.argv[1]):  # otherwise the parent is dead already
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the caller's own command
