"""`Fault`: a row of the table of faults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.faults.cluster import PLANES, Cluster

RunFault = Callable[[Cluster], Awaitable[str]]


@dataclass(frozen=True)
class Fault:
    """A row of the table. Every test run includes the `quick` faults."""

    name: str
    expected: str
    run: RunFault
    quick: bool = False
    planes: tuple[str, ...] = PLANES[:2]
    workers: int = 3
    prefill: int = 0
    decode: int = 0
    frontends: int = 1
    flags: tuple[str, ...] = ()
    timing: str = ""
    s3: bool = False
