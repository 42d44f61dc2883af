"""Stop strings over a stream of text: found across the borders of its pieces, never let out in
part."""

from __future__ import annotations

import re
from collections.abc import Sequence

PATTERN_CHARS = 16
"""Beyond so many characters a beginning is taken for granted, and looked at more closely."""


class StopStrings:
    """What ends an answer. Shared by all choices of a request.

    The match that ends first wins, and of those the longest: so the answer does not depend on how
    the text was cut into pieces. `include`: the stop string itself belongs to the answer.
    `may_begin(text)` is None where no stop string begins in `text`, not even at its end.
    """

    __slots__ = ("_beginnings", "_longest", "include", "may_begin", "strings")

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.include = include
        self._longest = max(map(len, self.strings))
        beginning = "|".join(_beginning(one) for one in self.strings)
        self.may_begin = re.compile(beginning).search
        self._beginnings = re.compile(f"(?={beginning})").finditer

    def ending_in(self, text: str, fresh: int) -> tuple[int, int, str] | None:
        """The first match in `text` that ends behind position `fresh`: (end, start, string)."""
        found: tuple[int, int, str] | None = None
        for string in self.strings:
            start = text.find(string, max(0, fresh - len(string) + 1))
            if start >= 0:
                match = (start + len(string), start, string)
                found = match if found is None else min(found, match)
        return found

    def begun_at(self, text: str) -> int:
        """Where the longest suffix of `text` begins that may become a stop string; len(text) where
        none does."""
        for hit in self._beginnings(text, max(0, len(text) - self._longest + 1)):
            tail = text[hit.start() :]
            if any(len(tail) < len(one) and one.startswith(tail) for one in self.strings):
                return hit.start()
        return len(text)


def _beginning(string: str) -> str:
    """A pattern: the first characters of `string`, or fewer at the end of the text."""
    pattern = ""
    for char in reversed(string[:PATTERN_CHARS]):
        pattern = re.escape(char) + (f"(?:\\Z|{pattern})" if pattern else "")
    return pattern


class StopScan:
    """One choice's search. `held`: text that may begin a stop string and must wait."""

    __slots__ = ("_stops", "held")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self.held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str | None]:
        """The next piece of text. Returns how many characters of `held` and `text` together may go
        out, and the stop string that ended the answer. Not armed: no match may end in this piece.
        """
        whole = self.held + text
        if armed and (match := self._stops.ending_in(whole, len(self.held))) is not None:
            end, start, string = match
            self.held = ""
            return (end if self._stops.include else start), string
        free = self._stops.begun_at(whole)
        self.held = whole[free:]
        return free, None
