"""The bar of a long command, which logs do not garble."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Self, TextIO

log = logging.getLogger(__name__)
BAR_WIDTH = 30
REDRAW_INTERVAL_S = 0.1
LINE_INTERVAL_S = 5.0
CLEAR_LINE = "\r\x1b[K"


def render_bar(share: float) -> str:
    """So far, from 0 to 1."""
    return f"[{'#' * round(share * BAR_WIDTH):<{BAR_WIDTH}}]"


def format_byte_progress(what: str, done: int, total: int) -> str:
    """One line of what is counted in bytes."""
    if not total:
        return f"{what} ..."
    share = min(1.0, done / total)
    return f"{what} {render_bar(share)} {share:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB"


def terminal_columns(out: TextIO) -> int | None:
    """What fits on one line, so that it can be drawn over; None: nobody knows."""
    try:
        return max(os.get_terminal_size(out.fileno()).columns - 1, 0) or None
    except (OSError, ValueError):
        return None


class ProgressBar:
    """Progress on a terminal as one line that is redrawn, elsewhere a line now and then. What else
    is to be seen there is written through this and appears above it. `as_logs`: log lines, for
    programs. Safe from several threads."""

    def __init__(self, out: TextIO, *, as_logs: bool = False) -> None:
        self._out = out
        self._as_logs = as_logs
        self._is_terminal = out.isatty() and not as_logs
        self._interval_s = REDRAW_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S
        self._last_shown = ("", time.monotonic())
        self._line = ""
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes; total 0: unknown."""
        if not self.should_redraw(what, last=done >= total):
            return
        if self._as_logs:
            fields = {"step": what, "done_bytes": done, "total_bytes": total}
            log.info("getting the model ready", extra={"fields": fields})
        elif self._is_terminal or total:
            self.show(format_byte_progress(what, done, total))

    def should_redraw(self, step: str = "", *, last: bool = False) -> bool:
        """Is it time to show it again? Asked once for each time it is shown; a new step and the
        last of one always are."""
        now = time.monotonic()
        told, when = self._last_shown
        if step == told and now - when < self._interval_s and not last:
            return False
        self._last_shown = (step, now)
        return True

    def show(self, line: str) -> None:
        """This is how far it is."""
        with self._lock:
            self._line = line[: terminal_columns(self._out)] if self._is_terminal else ""
            self._out.write(f"{CLEAR_LINE}{self._line}" if self._is_terminal else f"{line}\n")
            self._out.flush()

    def write(self, text: str) -> None:
        """Whole lines, above the bar."""
        with self._lock:
            self._out.write(f"{CLEAR_LINE}{text}{self._line}" if self._line else text)

    def flush(self) -> None:
        """Let all be seen."""
        self._out.flush()

    def isatty(self) -> bool:
        """Does a person look at it?"""
        return self._is_terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._line:
                self._line = ""
                self._out.write(CLEAR_LINE)
                self._out.flush()
