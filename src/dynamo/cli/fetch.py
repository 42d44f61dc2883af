"""Get the model's files before anything starts, with a bar that says how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from dynamo.core.settings import Settings

WIDTH = 30
REDRAW_S = 0.1
LINE_S = 5.0


def fetch(settings: Settings) -> Sequence[str]:
    """Find or fetch the model, and prove its encoder once. Returns the names it will be served
    under. Raises `ModelUnavailable`."""
    from dynamo.models.resolve import find_model

    with Bar(sys.stderr) as bar:
        files = find_model(settings.model.path, bar, with_weights=settings.engine.kind == "native")
    return settings.model.names or (files.name,)


class Bar:
    """Progress on a terminal as one line that is redrawn, elsewhere a line now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._told = ("", 0.0)
        self._drawn = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes; total 0: unknown."""
        now = time.monotonic()
        step, when = self._told
        if step == what and now - when < (REDRAW_S if self._tty else LINE_S) and done < total:
            return
        self._told = (what, now)
        if self._tty:
            self._out.write(f"\r{bar_line(what, done, total)}\x1b[K")
            self._out.flush()
            self._drawn = True
        elif total:
            print(bar_line(what, done, total), file=self._out, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()


def bar_line(what: str, done: int, total: int) -> str:
    """One line."""
    if not total:
        return f"{what} ..."
    share = min(1.0, done / total)
    filled = "#" * round(share * WIDTH)
    return f"{what} [{filled:<{WIDTH}}] {share:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB"
