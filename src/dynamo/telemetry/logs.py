"""Logs: text or JSON lines on stderr with component and request id. Modules have own levels.

Modules log constant text plus fields through the standard library:
`log.info("worker joined", extra={"fields": {"instance": id}})`. Prompts and answers are logged only
with `server.log_prompts`. Clients choose parts of what is logged. Lines therefore show characters
that are not printable as escapes.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from math import inf
from typing import Any, Protocol

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.redaction import redact
from dynamo.telemetry.stderr import on_loss, unblock_stderr

TRACE = 5
OFF = 100
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": OFF,
}
_LEVEL_NAMES = {TRACE: "TRACE", logging.WARNING: "WARN"}

PROMPTS_LOGGER = "dynamo.prompts"
"""The logger of prompts. Its lines are in no report."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the current task handles. Every line of the task contains it."""


class LogStream(Protocol):
    """Destination of log lines. Each call writes whole lines."""

    def write(self, text: str, /) -> object:
        """Write `text`."""

    def flush(self) -> object:
        """Flush buffered text."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""


def parse_levels(spec: str) -> dict[str, int]:
    """Parse RUST_LOG's syntax, `info,dynamo.scheduling=debug`, to levels by module.

    Module "" stands for all others. `::` separates packages like a dot. A dotted module name, or
    `dynamo`, without a level means `trace`; another single word is more likely a misspelt level.
    Raises `ConfigError`.
    """
    levels: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in spec.split(","))):
        module, equals, level = part.rpartition("=")
        if not equals and (level == "dynamo" or "." in level or "::" in level):
            module, level = level, "trace"
        if level.lower() not in LEVELS:
            raise ConfigError(
                f"unknown log level {level!r} in {spec!r}",
                hint=f"levels: {', '.join(LEVELS)}; example: info,dynamo.scheduling=debug",
                param="logging.level",
            )
        levels[module.replace("::", ".").strip(".")] = LEVELS[level.lower()]
    return levels


def set_levels(spec: str) -> None:
    """Apply `spec` to this process. Levels of an earlier call are reset."""
    levels = parse_levels(spec)
    for module in _modules_with_level:
        logging.getLogger(module).setLevel(logging.NOTSET)
    _modules_with_level.clear()
    logging.getLogger().setLevel(levels.pop("", logging.INFO))
    for module, level in levels.items():
        logging.getLogger(module).setLevel(level)
        _modules_with_level.add(module)


_modules_with_level: set[str] = set()


def configure_logging(
    level: str, fmt: str, component: str, stream: LogStream | None = None
) -> None:
    """Send log lines to `stream` as "text" or "json". Raises `ConfigError`.

    The default stream is stderr, which no longer blocks then.
    """
    set_levels(level)
    handler = _StderrHandler(stream or unblock_stderr())
    formatter = JsonFormatter(component) if fmt == "json" else TextFormatter(component)
    handler.setFormatter(formatter)
    on_loss(lambda lines: f"{formatter.format(_loss_record(lines))}\n")
    logging.getLogger().handlers[:] = [handler]
    logging.captureWarnings(True)
    for unused in ("logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks"):
        setattr(logging, unused, False)


def _loss_record(lines: int) -> logging.LogRecord:
    """Return the record that stands where lines are missing."""
    text = f"{lines} log lines were lost because nobody read stderr"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)


def escape_unprintable(text: str) -> str:
    """Return `text` with each character that is not printable as a Python escape.

    These are control characters, line and paragraph separators, bidirectional overrides and lone
    surrogates. They could change a terminal or forge a line.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


FOLD_S = 10.0
"""Equal warnings within this time are one line and a count."""
MAX_FOLDED = 64
KEPT_LINES, KEPT_CHARS = 100, 2000
last_lines: deque[str] = deque(maxlen=KEPT_LINES)
"""The last lines of this process."""


class Repeats(msgspec.Struct):
    """A warning, and how often it came again."""

    record: logging.LogRecord
    count: int = 0


class _StderrHandler(logging.Handler):
    """Ignores write errors: a closed stderr must not stop a server. Streams are line-buffered.
    Warnings and errors that come again within `FOLD_S` are counted; a line after that time tells
    how often they came."""

    def __init__(self, stream: LogStream) -> None:
        super().__init__()
        self._write = stream.write
        self._repeats: dict[tuple[str, str, str], Repeats] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record as a line."""
        with suppress(Exception):
            if self._repeats:
                self._tell_repeats(record.created)
            if record.levelno < logging.WARNING or not self._is_repeated(record):
                self._write_line(record)

    def close(self) -> None:
        """Tell of the last repeats."""
        with suppress(Exception):
            self._tell_repeats(inf)
        super().close()

    def _write_line(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        last_lines.append(line[:KEPT_CHARS])
        self._write(f"{line}\n")

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        """Count a record that came before, else remember it."""
        key = (record.name, record.getMessage(), repr(_record_fields(record)))
        repeats = self._repeats.get(key)
        if repeats is None or record.exc_info:
            if len(self._repeats) < MAX_FOLDED:
                self._repeats[key] = Repeats(record)
            return False
        repeats.count += 1
        if repeats.count == 1:  # the process may log nothing else for hours
            timer = threading.Timer(FOLD_S, self._tell_late)
            timer.daemon = True
            timer.start()
        return True

    def _tell_late(self) -> None:
        with self.lock or nullcontext(), suppress(Exception):
            self._tell_repeats(time.time())

    def _tell_repeats(self, now: float) -> None:
        """Forget the oldest warnings, and write how often each came again."""
        for key, repeats in list(self._repeats.items()):
            first = repeats.record
            if now - first.created < FOLD_S:
                return
            del self._repeats[key]
            if repeats.count:
                fields = {**_record_fields(first), "repeated": repeats.count}
                again = logging.LogRecord(
                    first.name, first.levelno, "", 0, first.msg, first.args, None
                )
                again.fields = fields
                self._write_line(again)


class _LineFormatter(logging.Formatter):
    """Shared parts of the text and JSON formatters."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component
        self._cached_second = -1
        self._cached_timestamp = ""

    def format_timestamp(self, record: logging.LogRecord) -> str:
        """Return the record's time as RFC 3339 in UTC with milliseconds."""
        second = int(record.created)
        if second != self._cached_second:
            self._cached_second = second
            self._cached_timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._cached_timestamp}.{int(record.msecs):03d}Z"

    def format_traceback(self, record: logging.LogRecord) -> str:
        """Return the record's traceback, or ""."""
        return self.formatException(record.exc_info) if record.exc_info else ""


class TextFormatter(_LineFormatter):
    """`TIME LEVEL component module: message key=value request_id=...`"""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line, followed by the traceback if there is one."""
        time, level = self.format_timestamp(record), _level_name(record)
        message = record.getMessage().rstrip()
        line = f"{time} {level:<5} {self.component} {record.name}: {message}"
        for key, value in _record_fields(record).items():
            line += f" {key}={_format_field(value)}"
        line = escape_unprintable(line)
        if trace := self.format_traceback(record):  # indented: a line of it looks like no record
            line += "".join(f"\n  {escape_unprintable(row)}" for row in trace.split("\n"))
        return redact(line)


class JsonFormatter(_LineFormatter):
    """Formats a JSON object: time, level, component, target, message, request_id, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line of JSON. Beyond printable characters it is ASCII."""
        line: dict[str, Any] = dict(_record_fields(record))
        line |= {
            "time": self.format_timestamp(record),
            "level": _level_name(record).lower(),
            "component": self.component,
            "target": record.name,
            "message": record.getMessage(),
        }
        if trace := self.format_traceback(record):
            line["trace"] = trace
        try:
            text = _json_encoder.encode(line).decode()
        except (TypeError, ValueError):  # e.g. a lone surrogate, or a tuple as a key
            texts = {str(key): escape_unprintable(str(value)) for key, value in line.items()}
            text = json.dumps(texts)
        if not text.isprintable():
            text = json.dumps(msgspec.json.decode(text))
        return redact(text)


_json_encoder = msgspec.json.Encoder(enc_hook=str)


def _level_name(record: logging.LogRecord) -> str:
    return _LEVEL_NAMES.get(record.levelno, record.levelname)


def _record_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    current = request_id.get()
    if current and "request_id" not in fields:
        return {**fields, "request_id": current}
    return fields


_needs_quotes = re.compile(r'[\s="]').search


def _format_field(value: Any) -> str:
    text = str(value)
    if text and not _needs_quotes(text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
