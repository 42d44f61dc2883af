"""A supervised child process: start, logs and reports, restarts, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.host.pids import catches
from dynamo.core.settings import Settings
from dynamo.core.tasks import run_all, wait_at_most
from dynamo.runtime.deployment import STATE_ROOT_VARIABLE
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.exit_status import (
    count_oom_kills,
    describe_exit,
    killed_by_oom,
    wait_for_pid,
)
from dynamo.runtime.processes.fork_server import ForkServer, StartedProcess
from dynamo.runtime.processes.parent_pipe import (
    PING,
    PING_ANSWER,
    STACKS_SIGNAL,
    ChildNotice,
    ChildOrder,
    ChildReport,
    ChildStart,
)
from dynamo.runtime.processes.restart_backoff import RestartBackoff
from dynamo.runtime.processes.watchdog import KILL_AFTER_S, Watchdog
from dynamo.runtime.shared_memory import SharedMemoryBroker

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10
HUNG_EXIT_TEXT = f"SIGKILL: its event loop did not answer for {KILL_AFTER_S:g} s"
OUTPUT_GRACE_S = 0.2
"""The output of a dead process is read until its end, or for this time. A process that the dead one
started in a session of its own may hold the pipe."""

CARDS_VARIABLE = "CUDA_VISIBLE_DEVICES"


class ChildProcess:
    """Keeps a process alive until it is stopped. `report` is its last report. `crash_loop_reason`
    is empty unless the process is in a crash loop. `restarts` counts its deaths, the last with
    `last_exit`, and `hangs` how often its event loop hung. `start_s` is the duration of the last
    start, 0 before the first was complete."""

    def __init__(
        self,
        spec: ChildSpec,
        clock: Clock,
        *,
        on_line: Callable[[str, bytes], None],
        on_change: Callable[[ChildProcess], None],
        on_death: Callable[[ChildProcess], None],
        state_root: Path,
        supervisor_id: str = "",
        shared_memory: SharedMemoryBroker,
        fork_server: ForkServer,
    ) -> None:
        self.spec = spec
        self.report = ChildReport()
        self.pid = 0
        self.ever_ready = False
        self.crash_loop_reason = ""
        self.restarts = self.hangs = 0
        self.last_exit = ""
        self.start_s = 0.0
        self.calls = 0
        """Calls that the process answered half a second ago at most, or at `request_calls`."""
        self._supervisor_id = supervisor_id
        self._shared_memory = shared_memory
        self._fork_server = fork_server
        self._watchdog = Watchdog()
        self._clock = clock
        self._on_line = on_line
        self._on_change = on_change
        self._on_death = on_death
        self._environ = os.environ | {STATE_ROOT_VARIABLE: str(state_root)}
        if spec.cards:
            self._environ[CARDS_VARIABLE] = ",".join(spec.cards)
        self._backoff = RestartBackoff()
        self._stopping = asyncio.Event()
        self._peak_rss_bytes = 0
        self._started_at = 0.0
        self._ready_at: float | None = None
        self._notice = ChildNotice()
        self._worker_role = ""
        self._stdin_writer: asyncio.StreamWriter | None = None

    @property
    def _settings(self) -> Settings:
        """The settings of the process, with the role that an order has given to it."""
        settings = self.spec.settings
        role = self._worker_role or settings.engine.role
        return replace(settings, engine=replace(settings.engine, role=role))

    @property
    def instance(self) -> str:
        """The instance id that the process reported, or an empty string."""
        return self.report.key.rpartition("/")[2]

    @property
    def ready(self) -> bool:
        """Whether the process runs and reported that it serves."""
        return self.pid != 0 and self.report.state == "ready"

    @property
    def sleeping(self) -> bool:
        """Whether the process runs and gave its memory back until it is woken."""
        return self.pid != 0 and self.report.state == "sleeping"

    @property
    def hung(self) -> bool:
        """Whether the event loop of the process does not answer."""
        return self.pid != 0 and self._watchdog.hung

    @property
    def start_error(self) -> str:
        """Why the process can never start, or an empty string."""
        if self.ever_ready or not self.report.fatal:
            return ""
        return f"cannot start: {self.report.fatal}"

    @property
    def unhealthy_reason(self) -> str:
        """Why the process does not serve, or an empty string."""
        if self.spec.standby:
            return ""
        if self.hung:
            return f"its event loop does not answer; it is killed after {KILL_AFTER_S:g} s"
        if self.ready or self.sleeping:
            return ""
        if reason := self.crash_loop_reason or self.start_error:
            return reason
        state = self.report.state if self.pid else "not running"
        return f"{state} after {self.last_exit}" if self.last_exit == HUNG_EXIT_TEXT else state

    async def run(self) -> None:
        """Start the process and restart it after each death. Returns after `stop_restarting` or
        after a report that the process can never start."""
        while not self._stopping.is_set():
            exit_text = await self._run_once()
            served_s = 0.0 if self._ready_at is None else self._clock.now() - self._ready_at
            self.ever_ready |= self._ready_at is not None
            if self._stopping.is_set() or (self.report.fatal and not self.ever_ready):
                return
            self.restarts += 1
            self.last_exit = exit_text
            fields = {"name": self.spec.name, "instance": self.instance, "exit": exit_text}
            self._on_death(self)
            self.report = ChildReport()
            await self._wait_before_restart(fields, self._backoff.next_delay_s(served_s))

    @property
    def desired(self) -> bool:
        """Whether the process is to run and to be restarted after its death."""
        return not self._stopping.is_set()

    def stop_restarting(self) -> None:
        """Do not restart the process after its next death."""
        self._stopping.set()
        self._on_change(self)

    def notify_preparing(self, preparing: str) -> None:
        """Tell the process, now and after each restart, what the deployment waits for."""
        self._send_notice(replace(self._notice, preparing=preparing))

    def reload_settings(self, settings: Settings) -> None:
        """Send reloaded settings to the process and use them after each restart."""
        self.spec = replace(self.spec, settings=settings)
        self._send_notice(replace(self._notice, settings=settings))

    def exchange_places(self, dead: ChildProcess) -> None:
        """Serve in the place of a dead process, which is started again as a standby process. Each
        keeps its devices."""
        own, place = self.spec, dead.spec
        self.spec, dead.spec = _with_devices(place, own), _with_devices(own, place)
        self.restarts, dead.restarts = dead.restarts, self.restarts
        self.last_exit, dead.last_exit = dead.last_exit, self.last_exit
        self._worker_role, dead._worker_role = dead._worker_role, ""
        dead._notice = replace(dead._notice, place="", settings=None)
        self._send_notice(replace(self._notice, settings=self._settings, place=place.name))

    def send_order(self, order: ChildOrder) -> None:
        """Send an order, which this process answers once. Later processes do not get it."""
        self._send_notice(replace(self._notice, order=order))

    def notify_leaving(self) -> None:
        """Tell the process before it is stopped that its clients can go to others."""
        self._send_notice(replace(self._notice, leaving=True))

    def _send_notice(self, notice: ChildNotice) -> None:
        self._notice = replace(notice, order=None)
        if self._stdin_writer is not None:
            self._stdin_writer.write(msgspec.json.encode(notice) + b"\n")

    def check_event_loop(self) -> None:
        """Ping the process, and kill it if it left a ping unanswered for `KILL_AFTER_S`. Call this
        every `PING_INTERVAL_S`. A process that drains is not checked."""
        if self._stdin_writer is None or self._stopping.is_set():
            return
        if self.report.state == "draining":
            return
        was_hung, was_expired = self._watchdog.hung, self._watchdog.expired
        if self._watchdog.tick(self._clock.now()):
            self.request_calls()
        if self._watchdog.hung != was_hung:
            self.hangs += self._watchdog.hung
            if self._watchdog.hung:
                self.dump_stacks()
            self._on_change(self)
        if self._watchdog.expired and not was_expired:
            fields = {"name": self.spec.name, "instance": self.instance, "silent_s": KILL_AFTER_S}
            log.error("process killed: its event loop does not answer", extra={"fields": fields})
            self.send_signal(signal.SIGKILL)

    def request_calls(self) -> None:
        """Ask the process for its calls now, which the watchdog does every `PING_INTERVAL_S`."""
        if self._stdin_writer is not None:
            self._stdin_writer.write(PING + b"\n")

    def dump_stacks(self) -> None:
        """Let the process write the stacks of its threads to its log. A hung process
        does so, too, unless a signal has stopped it."""
        if catches(self.pid, STACKS_SIGNAL):
            self.send_signal(STACKS_SIGNAL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL goes to its whole process group."""
        if self.pid == 0:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    async def _wait_before_restart(self, death: Mapping[str, str], wait_s: float) -> None:
        fields: dict[str, object] = {**death, "restart_s": wait_s}
        deaths = self._backoff.deaths_before_ready
        if self._backoff.crash_looping:
            self.crash_loop_reason = (
                f"died {deaths} times before it served, last by {self.last_exit}"
            )
            text = "process is in a crash loop: it dies before it serves"
            log.error(text, extra={"fields": fields | {"deaths": deaths}})
            self._on_change(self)
        else:
            log.warning("process died", extra={"fields": fields})
        await wait_at_most(self._stopping.wait(), wait_s)

    async def _run_once(self) -> str:
        """Run the process until its death. Returns a description of its exit."""
        self._ready_at = None
        self._started_at = self._clock.now()
        self._watchdog = Watchdog()
        kills_before = count_oom_kills()
        try:
            code = await self._spawn()
            if self._watchdog.expired:
                return HUNG_EXIT_TEXT
            out_of_memory = killed_by_oom(kills_before, self._peak_rss_bytes)
            return describe_exit(code, out_of_memory=out_of_memory)
        except OSError as error:
            return f"not started: {error}"

    async def _spawn(self) -> int:
        parent_end, child_end = socket.socketpair()
        reader, writer = os.pipe()
        with (
            parent_end,
            os.fdopen(reader, "rb", 0) as output,
            self._open_memory_channel() as memory_end,
        ):
            with child_end, os.fdopen(writer, "wb", 0), memory_end or nullcontext():
                memory = () if memory_end is None else (memory_end.fileno(),)
                process = await self._fork_server.start(
                    self.spec, self._environ, (child_end.fileno(), writer, *memory)
                )
            self.pid = process.pid
            try:
                return await self._supervise(process, parent_end, output)
            finally:
                self.send_signal(signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):  # `_supervise` has reaped it
                    os.waitpid(self.pid, 0)  # noqa: ASYNC222 - the process is killed
                self.pid = 0

    def _open_memory_channel(self) -> AbstractContextManager[socket.socket | None]:
        return self._shared_memory.channel() if self.spec.role == "worker" else nullcontext()

    async def _supervise(
        self, process: StartedProcess, parent_end: socket.socket, output: IO[bytes]
    ) -> int:
        reader, writer = await asyncio.open_connection(sock=parent_end)
        spec = self.spec
        memory_fd = process.fds[0] if process.fds else -1
        facts = (self._supervisor_id, memory_fd, spec.standby)
        start = ChildStart(self._settings, spec.name, os.getpid(), spec.task, *facts)
        writer.write(msgspec.json.encode(start) + b"\n")
        self._stdin_writer = writer
        if self._notice.preparing:
            self._send_notice(self._notice)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as timeout:
                    await run_all(
                        self._read_logs(output),
                        self._read_reports(reader),
                        self._wait_for_exit(process.pid, timeout),
                    )
        finally:
            self._stdin_writer = None
            writer.close()
        _, status, usage = os.wait4(process.pid, 0)  # noqa: ASYNC222 - the process is dead
        self._peak_rss_bytes = usage.ru_maxrss * 1024
        return os.waitstatus_to_exitcode(status)

    async def _wait_for_exit(self, pid: int, timeout: asyncio.Timeout) -> None:
        await wait_for_pid(pid)
        self.send_signal(signal.SIGKILL)  # kills processes that it left in its group
        timeout.reschedule(asyncio.get_running_loop().time() + OUTPUT_GRACE_S)

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line.startswith(PING_ANSWER):
                    if self._watchdog.on_answer():
                        self._on_change(self)
                    self.calls = int(line[len(PING_ANSWER) :].rstrip(b'"\n') or 0)
                    continue
                try:
                    self.report = msgspec.json.decode(line, type=ChildReport)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    log.warning("unreadable report", extra={"fields": {"name": self.spec.name}})
                    continue
                self._on_report()
                self._on_change(self)

    def _on_report(self) -> None:
        state, now = self.report.state, self._clock.now()
        self._worker_role = self.report.worker_role or self._worker_role
        if state in {"ready", "standby"} and self._started_at:
            self.start_s, self._started_at = now - self._started_at, 0.0
        if state == "ready" and self._ready_at is None:
            self._ready_at = now
            self.crash_loop_reason = ""

    async def _read_logs(self, output: IO[bytes]) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        with contextlib.closing(transport):
            rest = b""
            try:
                while data := await reader.read(MAX_LINE_BYTES):
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._on_line(self.spec.name, line)
                    if len(rest) > MAX_LINE_BYTES:
                        self._on_line(self.spec.name, rest)
                        rest = b""
            finally:
                if rest:
                    self._on_line(self.spec.name, rest)


def _with_devices(spec: ChildSpec, owner: ChildSpec) -> ChildSpec:
    """Return a spec with the devices of another one."""
    engine = replace(spec.settings.engine, device_ids=owner.settings.engine.device_ids)
    return replace(spec, settings=replace(spec.settings, engine=engine), cards=owner.cards)
