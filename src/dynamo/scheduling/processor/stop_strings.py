"""Stop strings in streamed text: found across the pieces of the stream, never sent in part."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_PATTERN_CHARS = 16
"""The search pattern contains this many characters of a stop string at most."""


class StopStrings:
    """The stop strings of a request, shared by its choices.

    The match that ends first wins, then the longest. The answer therefore does not depend on how
    the text is split. `search_beginning(text)` is None when no stop string begins in `text`, not
    even at its end. With `include_in_output` the stop string belongs to the answer.
    """

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.include_in_output = include_in_output
        self._max_length = max(map(len, self.strings))
        beginning = "|".join(_beginning_pattern(string) for string in self.strings)
        self.search_beginning = re.compile(beginning).search
        self._iter_beginnings = re.compile(f"(?={beginning})").finditer

    def find_match(self, text: str, fresh: int) -> tuple[int, int, str] | None:
        """Return the first match that ends after position `fresh` as (end, start, string)."""
        first: tuple[int, int, str] | None = None
        for string in self.strings:
            start = text.find(string, max(0, fresh - len(string) + 1))
            if start >= 0:
                match = (start + len(string), start, string)
                first = match if first is None else min(first, match)
        return first

    def find_partial_match(self, text: str) -> int:
        """Return the start of the longest suffix that may become a stop string, else len(text)."""
        for hit in self._iter_beginnings(text, max(0, len(text) - self._max_length + 1)):
            tail = text[hit.start() :]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self.strings):
                return hit.start()
        return len(text)


def _beginning_pattern(string: str) -> str:
    """Return a pattern for the first characters of `string`, or fewer at the end of a text."""
    pattern = ""
    for char in reversed(string[:MAX_PATTERN_CHARS]):
        pattern = re.escape(char) + (f"(?:\\Z|{pattern})" if pattern else "")
    return pattern


class StopStringScanner:
    """The search in one choice. `pending_text` may begin a stop string and is held back."""

    def __init__(self, stops: StopStrings) -> None:
        self._stop_strings = stops
        self.pending_text = ""

    def feed(self, text: str, *, may_match: bool = True) -> tuple[int, str | None]:
        """Return how many characters of `pending_text` and the next piece `text` may be sent, and
        the stop string that ended the answer. Without `may_match` no match may end in `text`."""
        whole = self.pending_text + text
        stops = self._stop_strings
        if may_match and (match := stops.find_match(whole, len(self.pending_text))) is not None:
            end, start, string = match
            self.pending_text = ""
            return (end if stops.include_in_output else start), string
        free = stops.find_partial_match(whole)
        self.pending_text = whole[free:]
        return free, None
