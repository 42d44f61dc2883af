"""One supervised process: started, listened to, restarted, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all
from dynamo.runtime.backoff import Backoff
from dynamo.runtime.exits import describe_exit, oom_kills, starved
from dynamo.runtime.link import Notice, Report, Start

log = logging.getLogger(__name__)

LINE_BYTES = 64 << 10


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep alive. Lower `stop_order` stops first; `needs_preparation`: it starts when
    the supervisor's preparation is done; `task`: what the role needs to know beside the settings;
    `command`: what to run instead of `dynamo _child ROLE` (it gets the same standard input)."""

    role: str
    name: str
    settings: Settings
    stop_order: int = 0
    needs_preparation: bool = False
    task: dict[str, Any] = {}
    command: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return self.command or (sys.executable, "-P", "-m", "dynamo", "_child", self.role)


class Child:
    """Keeps one process alive until it is stopped. `report` is what it told last; `trouble`: why it
    does not get to serve."""

    def __init__(
        self,
        spec: ProcessSpec,
        clock: Clock,
        *,
        line: Callable[[str, bytes], None],
        changed: Callable[[Child], None],
        died: Callable[[Child], None],
    ) -> None:
        self.spec = spec
        self.report = Report()
        self.pid = 0
        self.ever_ready = False
        self.trouble = ""
        self._clock = clock
        self._line = line
        self._changed = changed
        self._died = died
        self._backoff = Backoff()
        self._stopping = asyncio.Event()
        self._peak_bytes = 0
        self._ready_at: float | None = None
        self._notice = Notice()
        self._down: asyncio.StreamWriter | None = None

    @property
    def ready(self) -> bool:
        """It serves."""
        return self.pid != 0 and self.report.state == "ready"

    async def run(self) -> None:
        """Start it, and start it again whenever it dies. Returns when it was stopped or told that
        it can never start."""
        while not self._stopping.is_set():
            how = await self._life()
            served_s = 0.0 if self._ready_at is None else self._clock.now() - self._ready_at
            self.ever_ready |= self._ready_at is not None
            if self._stopping.is_set() or (self.report.fatal and not self.ever_ready):
                return
            self._died(self)
            self.report = Report()
            await self._pause(how, self._backoff.died(served_s))

    def hold(self) -> None:
        """Start it no more."""
        self._stopping.set()

    def prepare(self, preparing: str) -> None:
        """Tell it what the deployment waits for, now and whenever it starts anew."""
        self._notify(msgspec.structs.replace(self._notice, preparing=preparing))

    def reload(self, settings: Settings) -> None:
        """Let it run with these settings from now on."""
        self.spec = msgspec.structs.replace(self.spec, settings=settings)
        self._notify(msgspec.structs.replace(self._notice, settings=settings))

    def _notify(self, notice: Notice) -> None:
        self._notice = notice
        if self._down is not None:
            self._down.write(msgspec.json.encode(notice) + b"\n")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it, and SIGKILL to its whole group."""
        if self.pid == 0:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    async def _pause(self, how: str, wait_s: float) -> None:
        fields = {"name": self.spec.name, "exit": how, "restart_s": wait_s}
        deaths = self._backoff.deaths_unserved
        if self._backoff.looping:
            self.trouble = f"died {deaths} times before it served, last by {how}"
            log.error(
                "a process dies before it serves, again and again",
                extra={"fields": fields | {"deaths": deaths}},
            )
        else:
            log.warning("process died", extra={"fields": fields})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()

    async def _life(self) -> str:
        """From start to death; says how it ended."""
        self._ready_at = None
        kills = oom_kills()
        try:
            code = await self._started()
            return describe_exit(code, out_of_memory=starved(kills, self._peak_bytes))
        except OSError as error:
            return f"not started: {error}"

    async def _started(self) -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # From the main thread: PR_SET_PDEATHSIG counts the death of the thread that forked.
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command, a short fork
                self.spec.argv,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            theirs.close()
            self.pid = process.pid
            try:
                return await self._attend(process, ours)
            finally:
                self.send(signal.SIGKILL)
                process.wait()
                self.pid = 0

    async def _attend(self, process: subprocess.Popen[bytes], ours: socket.socket) -> int:
        reader, writer = await asyncio.open_connection(sock=ours)
        start = Start(self.spec.settings, self.spec.name, os.getpid(), self.spec.task)
        writer.write(msgspec.json.encode(start) + b"\n")
        self._down = writer
        if self._notice.preparing:
            self._notify(self._notice)
        try:
            await run_all(self._logs(process), self._reports(reader), self._death(process))
        finally:
            self._down = None
            writer.close()
        _, status, usage = os.wait4(process.pid, 0)  # noqa: ASYNC222 - it has died
        self._peak_bytes = usage.ru_maxrss * 1024
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode

    async def _death(self, process: subprocess.Popen[bytes]) -> None:
        await _exit_of(process.pid)
        self.send(signal.SIGKILL)  # what it left behind in its group

    async def _reports(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    self.report = msgspec.json.decode(line, type=Report)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    log.warning("unreadable report", extra={"fields": {"name": self.spec.name}})
                    continue
                if self.report.state == "ready" and self._ready_at is None:
                    self._ready_at = self._clock.now()
                    self.trouble = ""
                self._changed(self)

    async def _logs(self, process: subprocess.Popen[bytes]) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        with contextlib.closing(transport):
            rest = b""
            while data := await reader.read(LINE_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._line(self.spec.name, line)
                if len(rest) > LINE_BYTES:
                    self._line(self.spec.name, rest)
                    rest = b""
            if rest:
                self._line(self.spec.name, rest)


async def _exit_of(pid: int) -> None:
    """Return when our child `pid` has died; it is not reaped."""
    loop = asyncio.get_running_loop()
    died = asyncio.Event()
    fd = os.pidfd_open(pid)
    loop.add_reader(fd, died.set)
    try:
        await died.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
