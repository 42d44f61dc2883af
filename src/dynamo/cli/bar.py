"""The bar of a long command, which logs do not garble."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Self, TextIO

log = logging.getLogger(__name__)
WIDTH = 30
REDRAW_S = 0.1
LINE_S = 5.0
CLEAR = "\r\x1b[K"


def drawn(share: float) -> str:
    """So far, from 0 to 1."""
    return f"[{'#' * round(share * WIDTH):<{WIDTH}}]"


def bar_line(what: str, done: int, total: int) -> str:
    """One line of what is counted in bytes."""
    if not total:
        return f"{what} ..."
    share = min(1.0, done / total)
    return f"{what} {drawn(share)} {share:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB"


def columns(out: TextIO) -> int | None:
    """What fits on one line, so that it can be drawn over; None: nobody knows."""
    try:
        return max(os.get_terminal_size(out.fileno()).columns - 1, 0) or None
    except (OSError, ValueError):
        return None


class Bar:
    """Progress on a terminal as one line that is redrawn, elsewhere a line now and then. What else
    is to be seen there is written through this and appears above it. `as_logs`: log lines, for
    programs. Safe from several threads."""

    def __init__(self, out: TextIO, *, as_logs: bool = False) -> None:
        self._out = out
        self._as_logs = as_logs
        self._tty = out.isatty() and not as_logs
        self._every_s = REDRAW_S if self._tty else LINE_S
        self._told = ("", time.monotonic())
        self._line = ""
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes; total 0: unknown."""
        if not self.due(what, last=done >= total):
            return
        if self._as_logs:
            fields = {"step": what, "done_bytes": done, "total_bytes": total}
            log.info("getting the model ready", extra={"fields": fields})
        elif self._tty or total:
            self.show(bar_line(what, done, total))

    def due(self, step: str = "", *, last: bool = False) -> bool:
        """Is it time to show it again? Asked once for each time it is shown; a new step and the
        last of one always are."""
        now = time.monotonic()
        told, when = self._told
        if step == told and now - when < self._every_s and not last:
            return False
        self._told = (step, now)
        return True

    def show(self, line: str) -> None:
        """This is how far it is."""
        with self._lock:
            self._line = line[: columns(self._out)] if self._tty else ""
            self._out.write(f"{CLEAR}{self._line}" if self._tty else f"{line}\n")
            self._out.flush()

    def write(self, text: str) -> None:
        """Whole lines, above the bar."""
        with self._lock:
            self._out.write(f"{CLEAR}{text}{self._line}" if self._line else text)

    def flush(self) -> None:
        """Let all be seen."""
        self._out.flush()

    def isatty(self) -> bool:
        """Does a person look at it?"""
        return self._tty

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._line:
                self._line = ""
                self._out.write(CLEAR)
                self._out.flush()
