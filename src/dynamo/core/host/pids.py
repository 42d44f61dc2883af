"""Identifies processes by pid and start time; the kernel reuses a pid alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STATE_FIELD, PARENT_FIELD, START_TIME_FIELD = 2, 3, 21
"""Indices of `state`, `ppid` and `starttime` in /proc/PID/stat, counted from the pid (proc(5))."""


def start_ticks(pid: int) -> int:
    """The start of `pid` in clock ticks since boot; 0 for a zombie or without such a process."""
    return int(_read_stat_field(pid, START_TIME_FIELD))


def age_s(ticks: int) -> float:
    """The seconds since these clock ticks since boot; 0 for 0."""
    if not ticks:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def is_stopped(pid: int) -> bool:
    """Whether `pid` is stopped by a signal such as SIGSTOP, or by a debugger."""
    return _read_stat_field(pid, STATE_FIELD) in {"T", "t"}


def catches(pid: int, number: int) -> bool:
    """Whether `pid` handles this signal, which would else end it."""
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        mask = next(line for line in text.splitlines() if line.startswith("SigCgt:"))
        return bool(int(mask.split()[1], 16) >> (number - 1) & 1)
    return False


def ancestors(pid: int) -> Iterator[int]:
    """Yield the pids of the visible ancestors of `pid`, parent first."""
    while pid := int(_read_stat_field(pid, PARENT_FIELD)):
        yield pid


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process with this pid and start time is alive and not of another user."""
    return ticks != 0 and start_ticks(pid) == ticks and _may_be_own(pid)


def command_line(pid: int) -> str:
    """The command line of `pid`, joined by blanks; "" if unreadable."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def _read_stat_field(pid: int, field: int) -> str:
    """Read a field of /proc/PID/stat; "0" for a zombie or without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except OSError:
        return "0"
    fields = stat[stat.rindex(")") + 2 :].split()
    return "0" if fields[0] in {"Z", "X"} else fields[field - 2]


def _may_be_own(pid: int) -> bool:
    """Whether `pid` runs as this user, or as root, which also owns the files in /proc of processes
    with more capabilities than their user."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid in {os.getuid(), 0}
    except OSError:
        return False
