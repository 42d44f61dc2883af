"""What a day comes to."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dynamo.operations.replay.figures import ReplayDistribution


class ChaosResult(msgspec.Struct, frozen=True):
    """`right`: answered within the deadline, every token as it should be; `failed`: the others by
    what was wrong; `hit_gap_ms`: the longest pause of each answer that had one over half a second;
    `leaks`: what was left over at the end; `resident_mb`: of the process, hour by hour."""

    hours: float
    workers: int
    requests: int
    correct: int
    correct_share: float
    failed: Mapping[str, int]
    failure_messages: Sequence[str]
    stalled: int
    stall_ms: ReplayDistribution
    duration_ms: ReplayDistribution
    crashes: int
    partitions: int
    partitioned_workers: int
    counters: Mapping[str, float]
    leaks: Sequence[str]
    resident_mb: Sequence[float]
    wall_s: float
    cpu_s: float


def resident_mb() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 1e6, 1)


def parse_counters(rendered: str, names: Sequence[str]) -> dict[str, float]:
    """The samples of those counters that are not 0, of a page of metrics."""
    found = {}
    for line in rendered.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in names and float(value):
            found[name] = float(value)
    return found
