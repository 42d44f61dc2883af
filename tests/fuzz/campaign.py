"""Runs a fuzz target for some time and collects its findings."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.mutations import Mutator

LIMIT_S = 10.0
CHECK_EVERY = 500


class Target(ABC):
    """A system under fuzzing.

    An AssertionError, an unexpected exception or a logged error is a finding.
    """

    seeds: Sequence[bytes]
    words: Sequence[bytes]

    @abstractmethod
    async def open(self) -> None:
        """Start the system."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the system."""

    @abstractmethod
    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        """Process one input on a new connection until it ends. `pieces` are the parts of `data`."""

    @abstractmethod
    async def check(self) -> None:
        """Assert that a valid request is still answered."""

    @abstractmethod
    def open_count(self) -> int:
        """Return how many connections and calls are open."""

    def next(self, mutator: Mutator) -> bytes:
        """Return another input."""
        return mutator.next()


class Result(NamedTuple):
    """Result of a run. `grown_bytes` is the growth of resident memory after the first fifth."""

    runs: int
    slowest_s: float
    grown_bytes: int
    open_count: int
    findings: list[str]


class Findings(logging.Handler):
    """Collects logged errors and errors of the event loop."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        self.data = b""

    def emit(self, record: logging.LogRecord) -> None:
        self.add(f"logged: {record.getMessage()} {record.exc_info}")

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of the event loop."""
        self.add(f"loop: {context.get('message')} {context.get('exception')!r}")

    def add(self, text: str) -> None:
        """Add a finding with the current input."""
        self.texts.append(f"{text}\n  input {self.data!r}")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@asynccontextmanager
async def collect_errors() -> AsyncIterator[Findings]:
    """Collect all errors within the block. Warnings about peers are silenced."""
    findings, loop, root = Findings(), asyncio.get_running_loop(), logging.getLogger()
    former = loop.get_exception_handler()
    quiet = logging.getLogger("dynamo")
    level = quiet.level
    loop.set_exception_handler(findings.on_loop_error)
    root.addHandler(findings)
    quiet.setLevel(logging.ERROR)
    try:
        yield findings
    finally:
        quiet.setLevel(level)
        root.removeHandler(findings)
        loop.set_exception_handler(former)


async def run(target: Target, seconds: float, seed: int) -> Result:
    """Feed `target` for `seconds`. The same seed gives the same inputs."""
    mutator = Mutator(random.Random(seed), target.seeds, target.words)
    runs, slowest, settled = 0, 0.0, 0
    async with collect_errors() as findings:
        await target.open()
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds and len(findings.texts) < 10:
            if not settled and now > began + seconds / 5:
                gc.collect()
                settled = resident_bytes()
            findings.data = data = target.next(mutator)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await target.feed(data, mutator.pieces(data))
                    if runs % CHECK_EVERY == 0:
                        await target.check()
            except Exception as error:
                findings.add(repr(error))
            await asyncio.sleep(0)  # lets the loop drop the timeout of a feed that awaited nothing
            runs += 1
            slowest = max(slowest, time.monotonic() - now)
        gc.collect()
        grown, open_count = resident_bytes() - (settled or resident_bytes()), target.open_count()
        await target.close()
    return Result(runs, slowest, grown, open_count, findings.texts)
