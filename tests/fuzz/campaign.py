"""Feeds a target for some time and says what came of it."""

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
    """What is fed. An AssertionError, an unexpected exception or a logged error is a finding."""

    seeds: Sequence[bytes]
    words: Sequence[bytes]

    @abstractmethod
    async def open(self) -> None:
        """Ready to be fed."""

    @abstractmethod
    async def close(self) -> None:
        """Fed no more."""

    @abstractmethod
    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        """One input, whole and cut, on a connection of its own, to its end."""

    @abstractmethod
    async def check(self) -> None:
        """Others are served as ever."""

    @abstractmethod
    def held(self) -> int:
        """Connections and calls that are left."""

    def next(self, mutator: Mutator) -> bytes:
        """Another input."""
        return mutator.next()


class Result(NamedTuple):
    """`grown_bytes`: of resident memory since a fifth of the time was over."""

    runs: int
    slowest_s: float
    grown_bytes: int
    held: int
    findings: list[str]


class Findings(logging.Handler):
    """Errors that are logged, and what the loop complains of."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self.data = b""

    def emit(self, record: logging.LogRecord) -> None:
        self.add(f"logged: {record.getMessage()} {record.exc_info}")

    def complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler."""
        self.add(f"loop: {context.get('message')} {context.get('exception')!r}")

    def add(self, text: str) -> None:
        """One more, with the input that is being fed."""
        self.found.append(f"{text}\n  input {self.data!r}")


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@asynccontextmanager
async def listening() -> AsyncIterator[Findings]:
    """Whatever goes wrong meanwhile; warnings about peers are silenced."""
    findings, loop, root = Findings(), asyncio.get_running_loop(), logging.getLogger()
    former = loop.get_exception_handler()
    quiet = logging.getLogger("dynamo")
    level = quiet.level
    loop.set_exception_handler(findings.complain)
    root.addHandler(findings)
    quiet.setLevel(logging.ERROR)
    try:
        yield findings
    finally:
        quiet.setLevel(level)
        root.removeHandler(findings)
        loop.set_exception_handler(former)


async def run(target: Target, seconds: float, seed: int) -> Result:
    """Feed `target` for so long; the same seed bends in the same ways."""
    mutator = Mutator(random.Random(seed), target.seeds, target.words)
    runs, slowest, settled = 0, 0.0, 0
    async with listening() as findings:
        await target.open()
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds and len(findings.found) < 10:
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
            await asyncio.sleep(0)  # a feed that awaits nothing would pile up its timeouts
            runs += 1
            slowest = max(slowest, time.monotonic() - now)
        gc.collect()
        grown, held = resident_bytes() - (settled or resident_bytes()), target.held()
        await target.close()
    return Result(runs, slowest, grown, held, findings.found)
