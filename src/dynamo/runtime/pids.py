"""Processes by pid, and safely: a pid is reused, a pid with its start time is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PARENT_FIELD, START_TIME_FIELD = 3, 21
"""Indices of `ppid` and `starttime` in /proc/PID/stat, counted from the pid (proc(5))."""


def start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot; 0 where there is no such process, or it is
    only a zombie."""
    return _read_stat_field(pid, START_TIME_FIELD)


def ancestors(pid: int) -> Iterator[int]:
    """Its parent, that one's parent, and so on, as far as they can be seen."""
    while pid := _read_stat_field(pid, PARENT_FIELD):
        yield pid


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that started at `ticks` as `pid` still lives."""
    return ticks != 0 and start_ticks(pid) == ticks


def command_line(pid: int) -> str:
    """The command line of `pid`, blanks between its words; "" where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def own_start_ticks() -> int:
    """`start_ticks` of this process."""
    return start_ticks(os.getpid())


def _read_stat_field(pid: int, field: int) -> int:
    """One number of /proc/PID/stat; 0 where there is no such process, or it is only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except OSError:
        return 0
    fields = stat[stat.rindex(")") + 2 :].split()
    return 0 if fields[0] in {"Z", "X"} else int(fields[field - 2])
