"""Output of foreign engines as log lines: their loggers here, and what their processes print.

vLLM, SGLang and TensorRT-LLM log in formats of their own, start processes that inherit stdout and
stderr, and print there why they cannot start.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from dynamo.telemetry.stderr import is_unblocked

KEPT_LINES = 200
MAX_LINE_BYTES = 64 << 10
STANDARD_OUTPUTS = (1, 2)

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FORMATS = (
    # vLLM: (EngineCore pid=12) INFO 11-23 02:40:01 [core.py:55] text
    re.compile(
        r"(?:\((?P<process>[^()]+?) pid=\d+\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
        r"\d\d-\d\d [\d:.,]+ \[(?P<source>[^\]]+)\] ?(?P<message>.*)"
    ),
    # TensorRT-LLM: [11/23/2026-02:40:01] [TRT-LLM] [I] text
    re.compile(
        r"\[[\d/]+-[\d:]+\] \[TRT-LLM\](?: \[RANK (?P<process>\d+)\])? \[(?P<level>[A-Z])\] "
        r"?(?P<message>.*)"
    ),
    # SGLang: [2026-11-23 02:40:01 TP0] text
    re.compile(r"\[\d{4}-\d\d-\d\d [\d:.,]+(?: (?P<process>[^\]]+))?\] (?P<message>.*)"),
    # Lines without a logger: (EngineCore pid=12) text
    re.compile(r"\((?P<process>[^()]+?) pid=\d+\) (?P<message>.*)"),
)
_LEVELS = {
    "D": logging.DEBUG,
    "V": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
    **{name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")},
}
_EXCEPTION = re.compile(r"(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b: \S.*")
_REFERS_TO_ANOTHER = re.compile(r"see (?:the )?(?:root cause|stack trace|above)", re.IGNORECASE)


def use_own_handlers(logger: str) -> None:
    """Send the records of `logger`, which an engine has given handlers of its own, to ours.

    Processes that the engine forks inherit this. Their formats name the process, so its number is
    recorded from now on.
    """
    engine_log = logging.getLogger(logger)
    engine_log.handlers.clear()
    engine_log.propagate = True
    logging.logProcesses = True


class EngineOutput:
    """Turns each line that an engine's processes print on stdout and stderr into a log record.

    Such a process writes where the standard outputs of this one led when it was started, so these
    lead to a pipe between `open` and `close`. Where logs still use stderr itself, for example in
    tests, nothing is redirected. `logger` must not be one that an engine gives handlers: its lines
    would come back through the pipe.
    """

    def __init__(self, logger: str) -> None:
        self._log = logging.getLogger(logger)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._saved: list[tuple[int, int]] = []

    def open(self) -> None:
        """Redirect the standard outputs."""
        if self._saved or not is_unblocked():
            return
        reader, writer = os.pipe()
        for fd in STANDARD_OUTPUTS:
            self._saved.append((fd, os.dup(fd)))
            os.dup2(writer, fd)
        os.close(writer)
        name = f"output of {self._log.name}"
        threading.Thread(target=self._read, args=(reader,), name=name, daemon=True).start()

    def close(self) -> None:
        """Restore the standard outputs. Processes that still run keep the pipe."""
        for fd, saved in self._saved:
            os.dup2(saved, fd)
            os.close(saved)
        self._saved.clear()

    def failure_reason(self) -> str:
        """Return the last exception among the lines, without those that refer to another; or ""."""
        reasons = (line for line in reversed(self._lines) if _EXCEPTION.fullmatch(line))
        return next((line for line in reasons if not _REFERS_TO_ANOTHER.search(line)), "")

    def log_line(self, line: str) -> None:
        """Log a line with its level, process and text. An empty line is dropped."""
        level, fields, message = parse_line(line)
        if not message.strip():
            return
        self._lines.append(message.strip())
        self._log.log(level, "%s", message, extra={"fields": fields})

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                self.log_line(line.decode(errors="backslashreplace").rstrip("\r\n"))


def parse_line(line: str) -> tuple[int, Mapping[str, Any], str]:
    """Return the level, the fields and the text of a line in an engine's format."""
    plain = _ANSI.sub("", line)
    for form in _FORMATS:
        if match := form.fullmatch(plain):
            groups = match.groupdict()
            level = _LEVELS.get(groups.get("level") or "INFO", logging.INFO)
            names = ("process", "source")
            fields = {
                name: groups[name] for name in names if groups.get(name) not in {None, "None"}
            }
            return level, fields, str(groups["message"]).expandtabs(4)
    return logging.INFO, {}, plain
