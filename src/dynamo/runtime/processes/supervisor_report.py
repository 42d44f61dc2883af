"""The part of a report that only a supervisor knows: last lines, stacks and settings in force."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.redaction import redact
from dynamo.core.settings import Settings
from dynamo.core.settings.explain import changed_settings
from dynamo.core.settings.load import last_origins
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.child_logs import PrefixedLogWriter
from dynamo.runtime.processes.control import ControlRequest, send_control_request
from dynamo.telemetry.logs import last_lines

STACKS_S = 0.5
"""Time in which processes write their stacks."""


class SupervisorReport(msgspec.Struct, frozen=True):
    """The last lines by process, and the settings that are no defaults, without secrets. `origins`
    tells where they come from; some are made at the start and have none."""

    lines: Mapping[str, Sequence[str]] = {}
    settings: Mapping[str, Any] = {}
    origins: Mapping[str, str] = {}


def make_reporter(
    children: Sequence[ChildProcess], logs: PrefixedLogWriter, settings: Settings, clock: Clock
) -> Callable[[str], Any]:
    """Return a coroutine function that returns the encoded report: with the lines of the process of
    a name, or of all processes, which write their stacks before. The secrets that this process
    knows are not in it."""

    async def report(name: str) -> str:
        lines = {**logs.last_lines, "supervisor": last_lines}
        if name:
            lines = {name: lines.get(name, deque())}
        else:
            for child in children:
                child.dump_stacks()
            await clock.sleep(STACKS_S)
        shown = {name: [redact(line) for line in of_name] for name, of_name in lines.items()}
        body = SupervisorReport(shown, changed_settings(settings), last_origins)
        return redact(msgspec.json.encode(body, enc_hook=str).decode())

    return report


def ask_supervisor(folder: Path, name: str, timeout_s: float) -> SupervisorReport:
    """Return the report of the deployment with this state folder: with the lines of the process of
    a name, or of all. Blocks. Raises `NotFound`, `OSError`."""
    (text,) = send_control_request(ControlRequest("report", name), folder, timeout_s)
    return msgspec.json.decode(text, type=SupervisorReport)
