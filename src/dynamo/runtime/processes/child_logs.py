"""Writes the log lines of children to the output of their supervisor."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from dynamo.telemetry.logs import KEPT_CHARS, KEPT_LINES, LogStream, escape_unprintable

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class PrefixedLogWriter:
    """Writes lines of children with the child's name as prefix, in colour on a terminal. `bare`
    omits the prefix, for JSON lines that contain their component. Characters that are not printable
    are escaped. `last_lines` has the last lines of each child, also after its death."""

    def __init__(self, names: Sequence[str], out: LogStream, *, bare: bool = False) -> None:
        self._out = out
        self._bare = bare
        self._tty = out.isatty()
        self._width = max(map(len, names), default=0)
        self._prefixes: dict[str, str] = {}
        self.last_lines: dict[str, deque[str]] = {}
        for name in names:
            self._add_prefix(name)

    def __call__(self, name: str, line: bytes) -> None:
        """Write a line of the child `name`. Errors of a closed output are ignored."""
        if name not in self._prefixes:
            self._add_prefix(name)
        text = escape_unprintable(line.decode(errors="replace"))
        self.last_lines[name].append(text[:KEPT_CHARS])
        with contextlib.suppress(OSError):
            self._out.write(f"{self._prefixes[name]}{text}\n")
            self._out.flush()

    def _add_prefix(self, name: str) -> None:
        prefix = "" if self._bare else f"{name:<{self._width}} | "
        if self._tty and prefix:
            colour = COLOURS[len(self._prefixes) % len(COLOURS)]
            prefix = f"\x1b[{colour}m{prefix[:-1]}\x1b[0m "
        self._prefixes[name] = prefix
        self.last_lines.setdefault(name, deque(maxlen=KEPT_LINES))
