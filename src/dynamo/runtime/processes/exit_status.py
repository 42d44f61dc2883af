"""Describes how a process ended and detects kills by the kernel's out-of-memory killer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
MEMINFO = Path("/proc/meminfo")
SELF_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
MIN_OOM_VICTIM_SHARE = 0.05
"""A process that used less than this share of the memory is not taken for the killer's victim."""
OOM_KILL_TEXT = (
    "SIGKILL, probably by the kernel's out-of-memory killer (use fewer workers or --num-blocks)"
)


def describe_exit(code: int, *, out_of_memory: bool = False) -> str:
    """Return `exit CODE`, the name of the signal, or `OOM_KILL_TEXT`."""
    if code >= 0:
        return f"exit {code}"
    name = signal.Signals(-code).name
    return OOM_KILL_TEXT if out_of_memory and name == "SIGKILL" else name


def killed_by_oom(kills_before: int, peak_bytes: int) -> bool:
    """Whether the out-of-memory killer probably killed a process with this peak memory. The killer
    must have killed some process since `count_oom_kills` returned `kills_before`."""
    return (
        count_oom_kills() > kills_before
        and peak_bytes >= MIN_OOM_VICTIM_SHARE * _memory_limit_bytes()
    )


def count_oom_kills() -> int:
    """Count the out-of-memory kills of this host plus those of our control group. Blocks for
    microseconds. Unreadable counters count as 0."""
    return _read_counter(VMSTAT, "oom_kill") + _read_counter(
        _cgroup_folder() / "memory.events", "oom_kill"
    )


def _memory_limit_bytes() -> int:
    """The memory of this host, or the limit of our control group if that is smaller."""
    host = _read_counter(MEMINFO, "MemTotal:") * 1024
    try:
        return min(host, int((_cgroup_folder() / "memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return host


def _cgroup_folder() -> Path:
    """The folder of our control group (version 2)."""
    try:
        path = SELF_CGROUP.read_text().strip().rpartition("::/")[2]
    except OSError:
        path = ""
    return CGROUP_ROOT / path


def _read_counter(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[:1] == [name])


async def wait_for_pid(pid: int) -> None:
    """Return when the child `pid` has died, without reaping it."""
    loop = asyncio.get_running_loop()
    died = asyncio.Event()
    fd = os.pidfd_open(pid)
    loop.add_reader(fd, died.set)
    try:
        await died.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
