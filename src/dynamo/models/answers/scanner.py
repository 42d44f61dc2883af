"""Scanner: the unread text of an answer, for readers that wait in the middle of a format.

Readers are generators, which yield when they need more text than has arrived. Their result depends
on the whole text only, and not on the pieces in which it arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import lru_cache

from dynamo.models.answers.alphabet import MarkerAlphabet, MarkerSet

SPACE = " \t\r\n"
MAX_NAME_CHARS = 256
"""Longer texts are not names of tools or parameters."""

Waiting = Generator[None, None, None]
WaitingBool = Generator[None, None, bool]
WaitingText = Generator[None, None, str]


@lru_cache(maxsize=1024)
def marker_set(*markers: str) -> MarkerSet:
    """Return the set of these markers."""
    return MarkerSet(markers)


class Scanner:
    """The text that has arrived and was not read.

    `ended`: no more text will arrive; `cut`: because the answer was too long. `waits_in_text`: the
    reader waits outside of any format, and nothing is unread.
    """

    def __init__(self, alphabet: MarkerAlphabet) -> None:
        self.text = ""
        self.ended = False
        self.cut = False
        self.waits_in_text = False
        self.mark = alphabet.mark
        self._record: list[str] = []

    def take(self, length: int) -> str:
        """Read `length` characters."""
        piece, self.text = self.text[:length], self.text[length:]
        self._record.append(piece)
        return piece

    def put_back(self) -> None:
        """Take the last piece that was read back."""
        self.text = self._record.pop() + self.text

    def begin_record(self) -> None:
        """Forget what was read. `unread` returns to this place."""
        self._record.clear()

    def unread(self) -> int:
        """Return to the place of the last `begin_record`. Returns how many characters were read."""
        record = "".join(self._record)
        self.text = record + self.text
        self._record.clear()
        return len(record)

    def drop_record(self) -> None:
        """Forget what was read and everything that follows it."""
        self._record.clear()
        self.text = ""

    def more(self) -> WaitingBool:
        """Wait for more text. Returns False when the answer has ended."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> WaitingText:
        """Read white space. Returns the character behind it without reading it; "" at the end."""
        while True:
            stripped = self.text.lstrip(SPACE)
            self.take(len(self.text) - len(stripped))
            if stripped:
                return stripped[0]
            if not (yield from self.more()):
                return ""

    def take_literal(self, *literals: str) -> WaitingText:
        """Read the one of `literals` that comes next. Returns "" if none does."""
        while True:
            for literal in literals:
                if self.text.startswith(literal):
                    return self.take(len(literal))
            if not any(literal.startswith(self.text) for literal in literals):
                return ""
            if not (yield from self.more()):
                return ""

    def take_until(
        self, *markers: str, limit: int = MAX_NAME_CHARS
    ) -> Generator[None, None, tuple[str, str]]:
        """Read the next marker and the text before it, at most `limit` characters. Returns both.
        The marker is "" where none came; nothing is read then."""
        wanted, searched = marker_set(*markers), 0
        while True:
            match = wanted.search(self.text, searched)
            if match is not None and match.start() <= limit:
                text = self.take(match.start())
                return text, self.take(len(match[0]))
            searched = len(self.text) if match else wanted.partial(self.text)
            if searched > limit or not (yield from self.more()):
                return "", ""

    def pass_until(
        self, markers: MarkerSet, sink: Callable[[str], None], *, outside: bool = False
    ) -> WaitingText:
        """Pass text to `sink` up to the next marker, and read the marker. Returns "" at the end.
        `outside`: the text belongs to no format."""
        while True:
            match = markers.search(self.text)
            if match is not None:
                if match.start():
                    sink(self.take(match.start()))
                return self.take(len(match[0]))
            free = len(self.text) if self.ended and not self.cut else markers.partial(self.text)
            if free:
                sink(self.take(free))
            self.waits_in_text = outside and not self.text
            if self.ended:
                self._pass_cut_rest(sink)
                return ""
            yield
            self.waits_in_text = False

    def _pass_cut_rest(self, sink: Callable[[str], None]) -> None:
        """Pass on the beginning of a marker that was cut, if it has only ordinary letters."""
        if self.text and not any("\ud800" <= char <= "\udfff" for char in self.text):
            sink(self.text)
        self.text = ""
