"""Stop strings over a stream of text: found across the borders of its pieces, never let out in
part."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_PATTERN_CHARS = 16
"""Beyond so many characters a beginning is taken for granted, and looked at more closely."""


class StopStrings:
    """What ends an answer. Shared by all choices of a request.

    The match that ends first wins, and of those the longest: so the answer does not depend on how
    the text was cut into pieces. `include`: the stop string itself belongs to the answer.
    `may_begin(text)` is None where no stop string begins in `text`, not even at its end.
    """

    __slots__ = (
        "_iter_beginnings",
        "_max_length",
        "include_in_output",
        "search_beginning",
        "strings",
    )

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.include_in_output = include_in_output
        self._max_length = max(map(len, self.strings))
        beginning = "|".join(_beginning_pattern(one) for one in self.strings)
        self.search_beginning = re.compile(beginning).search
        self._iter_beginnings = re.compile(f"(?={beginning})").finditer

    def find_match(self, text: str, fresh: int) -> tuple[int, int, str] | None:
        """The first match in `text` that ends behind position `fresh`: (end, start, string)."""
        found: tuple[int, int, str] | None = None
        for string in self.strings:
            start = text.find(string, max(0, fresh - len(string) + 1))
            if start >= 0:
                match = (start + len(string), start, string)
                found = match if found is None else min(found, match)
        return found

    def find_partial_match(self, text: str) -> int:
        """Where the longest suffix of `text` begins that may become a stop string; len(text) where
        none does."""
        for hit in self._iter_beginnings(text, max(0, len(text) - self._max_length + 1)):
            tail = text[hit.start() :]
            if any(len(tail) < len(one) and one.startswith(tail) for one in self.strings):
                return hit.start()
        return len(text)


def _beginning_pattern(string: str) -> str:
    """A pattern: the first characters of `string`, or fewer at the end of the text."""
    pattern = ""
    for char in reversed(string[:MAX_PATTERN_CHARS]):
        pattern = re.escape(char) + (f"(?:\\Z|{pattern})" if pattern else "")
    return pattern


class StopStringScanner:
    """One choice's search. `held`: text that may begin a stop string and must wait."""

    __slots__ = ("_stop_strings", "pending_text")

    def __init__(self, stops: StopStrings) -> None:
        self._stop_strings = stops
        self.pending_text = ""

    def feed(self, text: str, *, may_match: bool = True) -> tuple[int, str | None]:
        """The next piece of text. Returns how many characters of `held` and `text` together may go
        out, and the stop string that ended the answer. Not armed: no match may end in this piece.
        """
        whole = self.pending_text + text
        if (
            may_match
            and (match := self._stop_strings.find_match(whole, len(self.pending_text))) is not None
        ):
            end, start, string = match
            self.pending_text = ""
            return (end if self._stop_strings.include_in_output else start), string
        free = self._stop_strings.find_partial_match(whole)
        self.pending_text = whole[free:]
        return free, None
