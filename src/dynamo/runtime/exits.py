"""How a process ended, in words; a kill for want of memory is told from others."""

from __future__ import annotations

import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
MUCH = 0.05
"""The kernel kills who uses much; who had less than this share of the memory was not meant."""
OUT_OF_MEMORY = (
    "SIGKILL, it seems by the kernel for want of memory (fewer workers or --num-blocks need less)"
)


def describe_exit(code: int, *, out_of_memory: bool = False) -> str:
    """`exit 1`, the signal's name, or that memory ran out."""
    if code >= 0:
        return f"exit {code}"
    name = signal.Signals(-code).name
    return OUT_OF_MEMORY if out_of_memory and name == "SIGKILL" else name


def starved(kills_before: int, peak_bytes: int) -> bool:
    """Whether a process that was killed, and had used so much at most, was killed for want of
    memory, as far as can be told: the kernel did that to somebody meanwhile."""
    return oom_kills() > kills_before and peak_bytes >= MUCH * _memory_bytes()


def oom_kills() -> int:
    """How many processes the kernel has killed so far for want of memory: on this host, or in our
    control group where that counts more. Blocks for microseconds; 0 where nothing tells."""
    return _count(VMSTAT, "oom_kill") + _count(_group() / "memory.events", "oom_kill")


def _memory_bytes() -> int:
    """What there is for us: of this host, or less where our control group has a limit."""
    host = _count(MEMINFO, "MemTotal:") * 1024
    try:
        return min(host, int((_group() / "memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return host


def _group() -> Path:
    """Our control group (version 2)."""
    try:
        path = CGROUP.read_text().strip().rpartition("::/")[2]
    except OSError:
        path = ""
    return CGROUPS / path


def _count(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[:1] == [name])
