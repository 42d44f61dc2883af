"""The bar of a long command."""

from __future__ import annotations

import time
from typing import Self, TextIO

WIDTH = 24
LINE_S = 10.0
CLEAR = "\r\x1b[K"


class Bar:
    """A bar on a terminal, at most every `bar_s`; elsewhere a line now and then."""

    def __init__(self, out: TextIO, bar_s: float = 0.0) -> None:
        self._out = out
        self._tty = out.isatty()
        self._every_s = bar_s if self._tty else LINE_S
        self._told = time.monotonic()

    def due(self) -> bool:
        """Is it time to show it again? Asked once for each time it is shown."""
        now = time.monotonic()
        if now - self._told < self._every_s:
            return False
        self._told = now
        return True

    def show(self, share: float, words: str) -> None:
        """So far (0 to 1), and what there is to say of it."""
        line = f"[{'#' * round(share * WIDTH):<{WIDTH}}] {words}"
        self._out.write(f"{CLEAR}{line}" if self._tty else f"{line}\n")
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tty:
            self._out.write(CLEAR)
            self._out.flush()
