"""The socket pair between the supervisor and a child, which has its end as standard input. The
supervisor sends JSON lines: a `ChildStart`, then `ChildNotice`s and `PING`s. The child sends
`ChildReport`s, and `PING_ANSWER`s from its event loop. End of file means that the other process is
dead."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.core.adapters import AdapterOrder
from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable
from dynamo.core.host.parent_death_signal import set_parent_death_signal
from dynamo.core.settings import Settings
from dynamo.runtime.deployment import ProcessState
from dynamo.runtime.shared_memory import SharedMemoryClient

if TYPE_CHECKING:
    import asyncio

EXIT_USAGE = 2
"""Exit code of a command with invalid arguments or settings."""
STACKS_SIGNAL = signal.SIGUSR2
"""Lets a process write the stacks of its threads to standard error, also while it hangs."""
PING = b'"ping"'
"""A line that asks whether the event loop of a child runs."""
PING_ANSWER = b'"alive'
"""The begin of the answer, which ends with the number of calls in flight. A child sends the first
one without a ping, which starts the checks."""
SUPERVISOR_ONLY_HINT = "only the supervisor starts this command; use `dynamo run`"


class ChildStart(msgspec.Struct, frozen=True):
    """The first message to a child. `supervisor` is the pid of the sender, and `supervisor_id` its
    instance id in discovery. `task` is what the child's role needs beside the settings.
    `memory_fd` is the child's socket for shared memory, or -1. A `standby` process serves nothing
    before a notice names its `place`."""

    settings: Settings
    name: str
    supervisor: int
    task: dict[str, Any] = {}
    supervisor_id: str = ""
    memory_fd: int = -1
    standby: bool = False


class ChildNotice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A later message to a child. `preparing` is what the deployment waits for, or empty.
    `settings` are reloaded settings; None leaves those of the start message. `leaving`: the process
    will be stopped, and its clients can go to others. `place`: the standby process serves from now
    on under this name. `order`: what a frontend is to send to workers."""

    preparing: str = ""
    settings: Settings | None = None
    leaving: bool = False
    place: str = ""
    order: ChildOrder | None = None


class ChildOrder(msgspec.Struct, frozen=True):
    """An order for the workers of a model, and the number of its answer."""

    number: int
    adapter: AdapterOrder


class ChildReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a child. `key` is the key of its process record in discovery. `fatal` is the
    error of a child that cannot start, even if it is started again. `code` is the exit code for the
    command in that case. `models` are those that a frontend serves, by each of their names.
    `worker_role` is the `engine.role` that an order has given to a worker. `adapters` has the
    folders of a worker's LoRA adapters by name; None: it can have none. `answered` is the number of
    the last order that was executed, and `refused` its encoded error."""

    state: ProcessState = "starting"
    address: str = ""
    status_url: str = ""
    key: str = ""
    fatal: str = ""
    hint: str = ""
    code: int = 1
    models: dict[str, str] = {}
    worker_role: str = ""
    adapters: dict[str, str] | None = None
    answered: int = 0
    refused: bytes = b""

    def to_error(self) -> DynamoError:
        """Convert `fatal` to the error that the command raises."""
        kind = ConfigError if self.code == EXIT_USAGE else ModelUnavailable
        return kind(self.fatal, hint=self.hint)


class ParentPipe:
    """The child's end of the socket pair."""

    def __init__(self, fd: int, start: ChildStart, rest: bytes = b"") -> None:
        self._fd = fd
        self._buffer = rest
        self._notice_listener: Callable[[ChildNotice], None] | None = None
        self._last_notice = ChildNotice()
        self._answers_pings = False
        self.start_message = start
        self.count_calls: Callable[[], int] = lambda: 0
        """Returns how many calls this process answers now."""
        self.shared_memory = SharedMemoryClient(start.memory_fd) if start.memory_fd >= 0 else None

    @classmethod
    def from_stdin(cls) -> ParentPipe:
        """Take over standard input and read the start message. Blocks. Raises `ConfigError`."""
        if os.isatty(0):
            raise ConfigError("standard input is a terminal", hint=SUPERVISOR_ONLY_HINT)
        fd = os.dup(0)  # not inherited, unlike 0 itself
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return cls.from_fd(fd)

    @classmethod
    def from_fd(cls, fd: int) -> ParentPipe:
        """Read the start message. Blocks. Raises `ConfigError`."""
        data = b""
        while b"\n" not in data and (more := os.read(fd, 1 << 16)):
            data += more
        line, _, rest = data.partition(b"\n")
        try:
            return cls(fd, msgspec.json.decode(line, type=ChildStart), rest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"no start message on standard input: {error}"
            raise ConfigError(message, hint=SUPERVISOR_ONLY_HINT) from None

    def die_with_parent(self) -> None:
        """Let the kernel kill this process when the supervisor dies; exit if it is dead already."""
        set_parent_death_signal()
        if os.getppid() != self.start_message.supervisor:
            os._exit(1)

    def watch_parent(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
        """Call `on_death` when the supervisor's end closes."""
        os.set_blocking(self._fd, False)
        self._parse_notices(b"")
        loop.add_reader(self._fd, self._on_readable, loop, on_death)

    def on_notice(self, listener: Callable[[ChildNotice], None]) -> None:
        """Call `listener` with the last notice and with every later notice."""
        self._notice_listener = listener
        listener(self._last_notice)

    def send_report(self, report: ChildReport) -> None:
        """Send a report. The death of the supervisor is ignored."""
        self._send_line(msgspec.json.encode(report))

    def answer_pings(self) -> None:
        """Let the supervisor check from now on that the event loop runs. May be called twice."""
        if not self._answers_pings:
            self._answers_pings = True
            self._answer_ping()

    def _answer_ping(self) -> None:
        self._send_line(b'%s %d"' % (PING_ANSWER, self.count_calls()))

    def _send_line(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, line + b"\n")

    def _on_readable(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
        try:
            data = os.read(self._fd, 1 << 12)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(self._fd)
            on_death()
        self._parse_notices(data)

    def _parse_notices(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line == PING:
                self._answer_ping()
                continue
            self._last_notice = msgspec.json.decode(line, type=ChildNotice)
            if self._notice_listener is not None:
                self._notice_listener(self._last_notice)
