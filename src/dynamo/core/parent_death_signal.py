"""The parent death signal, for children that must not outlive their parent."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""Constant of linux/prctl.h."""


def set_parent_death_signal() -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
