"""Processes by pid, and safely: a pid is reused, a pid with its start time is not."""

from __future__ import annotations

import os
from pathlib import Path

START_TIME_FIELD = 21
"""Index of `starttime` in /proc/PID/stat, counted from the pid (proc(5))."""


def start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot; 0 where there is no such process, or it is
    only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except OSError:
        return 0
    fields = stat[stat.rindex(")") + 2 :].split()
    return 0 if fields[0] in {"Z", "X"} else int(fields[START_TIME_FIELD - 2])


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that started at `ticks` as `pid` still lives."""
    return ticks != 0 and start_ticks(pid) == ticks


def command(pid: int) -> str:
    """The command line of `pid`, blanks between its words; "" where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def own_start_ticks() -> int:
    """`start_ticks` of this process."""
    return start_ticks(os.getpid())
