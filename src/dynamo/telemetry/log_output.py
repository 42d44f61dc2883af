"""The destination of log lines: standard error, standard output, or a file that is rotated."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TextIO

from dynamo.core.errors import ConfigError
from dynamo.telemetry.logs import LogStream
from dynamo.telemetry.stderr import open_stdout, unblock_stderr

MAX_FILE_BYTES = 64 << 20
KEPT_FILES = 5
"""Older files: `dynamo.log.1` is the newest of them."""


def open_log_output(output: str) -> LogStream:
    """Open the output that `logging.output` names. Raises `ConfigError` for a file that cannot be
    written."""
    check_log_output(output)
    if "/" in output:
        return RotatedFile(Path(output))
    if output == "stdout":
        return open_stdout()
    return unblock_stderr()


def check_log_output(output: str) -> None:
    """Raise `ConfigError` unless `output` is stderr, stdout or the path of a file."""
    if output not in {"stderr", "stdout"} and "/" not in output:
        raise ConfigError(
            f"logging.output = {output!r} is no destination of log lines",
            hint="give stderr, stdout, or the path of a file, such as ./dynamo.log",
            param="logging.output",
        )


class RotatedFile:
    """A file of lines. At `MAX_FILE_BYTES` it is renamed, and a new one begins. A failed write
    loses its lines: a full disk must not stop a server."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises `ConfigError`."""
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"log lines cannot be written to {path}: {error.strerror}",
                hint="create its folder, or choose another logging.output",
                param="logging.output",
            ) from None

    def write(self, text: str, /) -> None:
        """Append lines. Raises `OSError`."""
        with self._lock:
            self._file.write(text)
            self._file.flush()
            if self._file.tell() >= self._max_bytes:
                self._rotate()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def flush(self) -> None:
        """Return: each write is flushed."""

    def isatty(self) -> bool:
        """Return False."""
        return False

    def _open(self) -> TextIO:
        return self._path.open("a", encoding="utf-8", errors="backslashreplace")

    def _rotate(self) -> None:
        for number in range(KEPT_FILES - 1, 0, -1):
            older = Path(f"{self._path}.{number}")
            if older.exists():
                os.replace(older, f"{self._path}.{number + 1}")  # noqa: PTH105 - a text
        os.replace(self._path, f"{self._path}.1")  # noqa: PTH105 - as above
        self._file.close()
        self._file = self._open()
