"""How a process ended, in words; a kill for want of memory is told from others."""

from __future__ import annotations

import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
MEMINFO = Path("/proc/meminfo")
SELF_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
MIN_OOM_VICTIM_SHARE = 0.05
"""The kernel kills who uses much; who had less than this share of the memory was not meant."""
OOM_KILL_TEXT = (
    "SIGKILL, it seems by the kernel for want of memory (fewer workers or --num-blocks need less)"
)


def describe_exit(code: int, *, out_of_memory: bool = False) -> str:
    """`exit 1`, the signal's name, or that memory ran out."""
    if code >= 0:
        return f"exit {code}"
    name = signal.Signals(-code).name
    return OOM_KILL_TEXT if out_of_memory and name == "SIGKILL" else name


def killed_by_oom(kills_before: int, peak_bytes: int) -> bool:
    """Whether a process that was killed, and had used so much at most, was killed for want of
    memory, as far as can be told: the kernel did that to somebody meanwhile."""
    return (
        count_oom_kills() > kills_before
        and peak_bytes >= MIN_OOM_VICTIM_SHARE * _memory_limit_bytes()
    )


def count_oom_kills() -> int:
    """How many processes the kernel has killed so far for want of memory: on this host, or in our
    control group where that counts more. Blocks for microseconds; 0 where nothing tells."""
    return _read_counter(VMSTAT, "oom_kill") + _read_counter(
        _cgroup_folder() / "memory.events", "oom_kill"
    )


def _memory_limit_bytes() -> int:
    """What there is for us: of this host, or less where our control group has a limit."""
    host = _read_counter(MEMINFO, "MemTotal:") * 1024
    try:
        return min(host, int((_cgroup_folder() / "memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return host


def _cgroup_folder() -> Path:
    """Our control group (version 2)."""
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
