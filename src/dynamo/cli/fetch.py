"""Show how far the model's files are: a bar that logs do not garble."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TextIO

from dynamo.core.settings import Settings

log = logging.getLogger(__name__)
WIDTH = 30
REDRAW_S = 0.1
LINE_S = 5.0
CLEAR = "\r\x1b[K"


def names_of(settings: Settings) -> Sequence[str]:
    """What the model will be served as. Raises `ModelUnavailable` for one that cannot be."""
    from dynamo.models.location import locate

    return settings.model.names or (locate(settings.model.path).name,)


def fetch(settings: Settings) -> Sequence[str]:
    """Find or fetch the model, and prove its encoder once. Returns the names it will be served
    under. Raises `ModelUnavailable`. Blocks."""
    from dynamo.models.resolve import find_model

    with Bar(sys.stderr) as bar:
        find_model(settings.model.path, bar, with_weights=settings.engine.kind == "native")
    return names_of(settings)


def bar_line(what: str, done: int, total: int) -> str:
    """One line."""
    if not total:
        return f"{what} ..."
    share = min(1.0, done / total)
    filled = "#" * round(share * WIDTH)
    return f"{what} [{filled:<{WIDTH}}] {share:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB"


class Bar:
    """Progress on a terminal as one line that is redrawn, elsewhere a line now and then. What else
    is to be seen there is written through this and appears above it. `as_logs`: log lines, for
    programs. Safe from several threads."""

    def __init__(
        self, out: TextIO, *, as_logs: bool = False, line: Callable[[str, int, int], str] = bar_line
    ) -> None:
        self._out = out
        self._line = line
        self._as_logs = as_logs
        self._tty = out.isatty() and not as_logs
        self._told = ("", 0.0)
        self._drawn = ""
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes; total 0: unknown."""
        now = time.monotonic()
        step, when = self._told
        if step == what and now - when < (REDRAW_S if self._tty else LINE_S) and done < total:
            return
        self._told = (what, now)
        if self._as_logs:
            fields = {"step": what, "done_bytes": done, "total_bytes": total}
            log.info("getting the model ready", extra={"fields": fields})
        elif self._tty or total:
            self._show(self._line(what, done, total))

    def write(self, text: str) -> None:
        """Whole lines, above the bar."""
        with self._lock:
            self._out.write(f"{CLEAR}{text}{self._drawn}" if self._drawn else text)

    def flush(self) -> None:
        """Let all be seen."""
        self._out.flush()

    def isatty(self) -> bool:
        """Does a person look at it?"""
        return self._tty

    def _show(self, line: str) -> None:
        with self._lock:
            self._drawn = line if self._tty else ""
            self._out.write(f"{CLEAR}{line}" if self._tty else f"{line}\n")
            self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._drawn:
                self._drawn = ""
                self._out.write(CLEAR)
                self._out.flush()
