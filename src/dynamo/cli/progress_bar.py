"""A progress bar for long commands. Log lines appear above the bar."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Self

from dynamo.telemetry.logs import LogStream

log = logging.getLogger(__name__)
BAR_WIDTH = 30
REDRAW_INTERVAL_S = 0.1
LINE_INTERVAL_S = 5.0
CLEAR_LINE = "\r\x1b[K"


def render_bar(share: float) -> str:
    """Return a text bar for a `share` from 0 to 1."""
    return f"[{'#' * round(share * BAR_WIDTH):<{BAR_WIDTH}}]"


def format_byte_progress(step: str, done: int, total: int) -> str:
    """Format the progress of a step in bytes. `total` is 0 if it is unknown."""
    if not total:
        return f"{step} ..."
    share = min(1.0, done / total)
    return f"{step} {render_bar(share)} {share:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB"


def terminal_columns(out: LogStream) -> int | None:
    """Return the columns that fit on a line without wrapping; None if the width is unknown."""
    try:
        return max(os.get_terminal_size(out.fileno()).columns - 1, 0) or None  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None


class ProgressBar:
    """Shows progress as a line that is redrawn on a terminal, elsewhere as a line every 5 s. Other
    output to `out` must go through `write` and appears above the bar. With `as_logs`, progress is
    logged instead. Methods may be called from several threads."""

    def __init__(self, out: LogStream, *, as_logs: bool = False) -> None:
        self._out = out
        self._as_logs = as_logs
        self._is_terminal = out.isatty() and not as_logs
        self._interval_s = REDRAW_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S
        self._shown_s = {"": time.monotonic()}
        self._line = ""
        self._lock = threading.Lock()

    def __call__(self, step: str, done: int, total: int) -> None:
        """Show `done` of `total` bytes of a step. `total` is 0 if it is unknown."""
        if not self.should_redraw(step, last=done >= total):
            return
        if self._as_logs:
            fields = {"step": step, "done_bytes": done, "total_bytes": total}
            log.info("preparing the model", extra={"fields": fields})
        elif self._is_terminal or total:
            self.show(format_byte_progress(step, done, total))

    def should_redraw(self, step: str = "", *, last: bool = False) -> bool:
        """Return True, and start a new interval of the step, if progress should be shown now. A new
        step and the `last` progress of a step are always shown."""
        now, shown_s = time.monotonic(), self._shown_s.get(step)
        if shown_s is not None and now - shown_s < self._interval_s and not last:
            return False
        self._shown_s[step] = now
        return True

    def show(self, line: str) -> None:
        """Draw `line` as the bar."""
        with self._lock:
            self._line = line[: terminal_columns(self._out)] if self._is_terminal else ""
            self._out.write(f"{CLEAR_LINE}{self._line}" if self._is_terminal else f"{line}\n")
            self._out.flush()

    def write(self, text: str) -> None:
        """Write complete lines above the bar."""
        with self._lock:
            self._out.write(f"{CLEAR_LINE}{text}{self._line}" if self._line else text)

    def flush(self) -> None:
        """Flush the output stream."""
        self._out.flush()

    def isatty(self) -> bool:
        """Return True if the bar is redrawn on a terminal."""
        return self._is_terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._line:
                self._line = ""
                self._out.write(CLEAR_LINE)
                self._out.flush()
