"""The processes that an engine in this process starts by itself, and their end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from dynamo.core.errors import WorkerFailed
from dynamo.inference.engines import process_guard

log = logging.getLogger(__name__)

OWNER_VARIABLE = "DYNAMO_ENGINE_OWNER"
SHUTDOWN_TIMEOUT_S = 10.0
"""Time for an engine to end by itself, before its processes are killed."""
START_TIMEOUT_S = 5.0
"""Time for a start to fail after its processes were killed."""


class EngineProcesses:
    """Owns the processes that are started within `starting`, and those that they start.

    All of them inherit an environment variable, which the system shows as it was at their start.
    So they must be new programs (`spawn`), not forks. A guard process kills them when this process
    ends, however it ends: also by SIGKILL, and also with its process group. Needs /proc.
    """

    def __init__(self) -> None:
        self._variable = (OWNER_VARIABLE, f"{os.getpid()}-{secrets.token_hex(8)}")
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._starts = 0
        self._closed = False

    async def open(self) -> None:
        """Start the guard. Call it before `starting`."""
        self._guard = await asyncio.to_thread(self._start_guard)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Own the processes that are started in the `with` statement.

        They are killed if `close` was called meanwhile: a thread that starts an engine continues
        when the task that waits for it is cancelled. Raises `WorkerFailed` after `close`.
        """
        name, value = self._variable
        with self._lock:
            if self._closed:
                raise WorkerFailed("the engine was stopped before its processes were started")
            self._starts += 1
        os.environ[name] = value  # the engine starts its processes, and takes no variables
        try:
            yield
        finally:
            os.environ.pop(name, None)
            with self._lock:
                self._starts -= 1
            self._release_guard()

    def find(self) -> list[int]:
        """Return the ids of the processes that run. Blocks for some milliseconds."""
        return process_guard.find_processes("=".join(self._variable).encode())

    async def close(self) -> None:
        """Kill the processes that are left, and return when they are gone. Processes that
        a start still adds are killed for `START_TIMEOUT_S`, and once more when the start ends."""
        with self._lock:
            self._closed = True
        await asyncio.to_thread(self._close)

    async def close_after(self, shutdown: Callable[[], Awaitable[None]]) -> None:
        """Wait for `shutdown`, at most `SHUTDOWN_TIMEOUT_S`, and close, also if it fails."""
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await shutdown()
        except TimeoutError:
            log.warning(
                "the engine did not end within %g s; its processes are killed", SHUTDOWN_TIMEOUT_S
            )
        finally:
            await self.close()

    def _close(self) -> None:
        end_s = time.monotonic() + START_TIMEOUT_S
        while self._starts and time.monotonic() < end_s:
            for process in self.find():
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(process_guard.SEARCH_INTERVAL_S)
        self._release_guard()

    def _release_guard(self) -> None:
        """Let the guard kill what is left after `close`, unless a start is in progress."""
        with self._lock:
            if self._starts or not self._closed:
                return
            guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate()

    def _start_guard(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-I", "-S", process_guard.__file__, "=".join(self._variable)]
        null = subprocess.DEVNULL
        return subprocess.Popen(  # noqa: S603 - the program and its argument are ours
            program, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )
