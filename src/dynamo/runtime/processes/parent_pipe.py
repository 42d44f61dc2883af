"""The line between the supervisor and a child: the child's standard input is one end of a socket
pair. Down it come JSON lines, one `Start` and then `Notice`s; up go `Report` lines; its end means
that the other side is dead, however it died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable
from dynamo.core.parent_death_signal import set_parent_death_signal
from dynamo.core.settings import Settings
from dynamo.runtime.deployment import ProcessState

if TYPE_CHECKING:
    import asyncio

EXIT_USAGE = 2
"""Exit code of a command that was given something impossible."""
SUPERVISOR_ONLY_HINT = "this command is for the supervisor; use `dynamo run`"


class ChildStart(msgspec.Struct, frozen=True):
    """What a child is told first. `task`: what its role needs to know beside the settings."""

    settings: Settings
    name: str
    supervisor: int
    task: dict[str, Any] = {}


class ChildNotice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child is told later. `preparing`: what the deployment still waits for, "" = nothing;
    `settings`: those that hold from now on, None = those of the start."""

    preparing: str = ""
    settings: Settings | None = None


class ChildReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child tells. `fatal`: it cannot start, and trying again would not help; `code` is the
    exit code that the command should end with. `key`: of its process record in discovery."""

    state: ProcessState = "starting"
    address: str = ""
    status_url: str = ""
    key: str = ""
    fatal: str = ""
    hint: str = ""
    code: int = 1

    def to_error(self) -> DynamoError:
        """What `fatal` was when it was raised, as far as the command is concerned."""
        kind = ConfigError if self.code == EXIT_USAGE else ModelUnavailable
        return kind(self.fatal, hint=self.hint)


class ParentPipe:
    """The child's end."""

    def __init__(self, fd: int, start: ChildStart, rest: bytes = b"") -> None:
        self._fd = fd
        self._buffer = rest
        self._notice_listener: Callable[[ChildNotice], None] | None = None
        self._last_notice = ChildNotice()
        self.start_message = start

    @classmethod
    def from_stdin(cls) -> ParentPipe:
        """Take over standard input and read the first line. Raises `ConfigError`. Blocks."""
        if os.isatty(0):
            raise ConfigError("nobody types to this command", hint=SUPERVISOR_ONLY_HINT)
        fd = os.dup(0)  # not inherited, unlike 0 itself
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return cls.from_fd(fd)

    @classmethod
    def from_fd(cls, fd: int) -> ParentPipe:
        """Read the first line. Raises `ConfigError`. Blocks."""
        data = b""
        while b"\n" not in data and (more := os.read(fd, 1 << 16)):
            data += more
        line, _, rest = data.partition(b"\n")
        try:
            return cls(fd, msgspec.json.decode(line, type=ChildStart), rest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"no start line on standard input: {error}",
                hint=SUPERVISOR_ONLY_HINT,
            ) from None

    def die_with_parent(self) -> None:
        """Be killed when the supervisor dies; exits at once if that has happened already."""
        set_parent_death_signal()
        if os.getppid() != self.start_message.supervisor:
            os._exit(1)

    def watch_parent(self, loop: asyncio.AbstractEventLoop, gone: Callable[[], None]) -> None:
        """Call `gone` when the supervisor's end closes."""
        os.set_blocking(self._fd, False)
        self._parse_notices(b"")
        loop.add_reader(self._fd, self._on_readable, loop, gone)

    def on_notice(self, told: Callable[[ChildNotice], None]) -> None:
        """Call `told` with the last notice, and with every later one."""
        self._notice_listener = told
        told(self._last_notice)

    def send_report(self, report: ChildReport) -> None:
        """Send one report; a supervisor that is gone hears nothing."""
        with contextlib.suppress(OSError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")

    def _on_readable(self, loop: asyncio.AbstractEventLoop, gone: Callable[[], None]) -> None:
        try:
            data = os.read(self._fd, 1 << 12)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(self._fd)
            gone()
        self._parse_notices(data)

    def _parse_notices(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._last_notice = msgspec.json.decode(line, type=ChildNotice)
            if self._notice_listener is not None:
                self._notice_listener(self._last_notice)
