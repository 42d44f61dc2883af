"""A child that must not outlive the process that started it."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def set_parent_death_signal() -> None:
    """Be killed from now on when the thread ends that started this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
