"""Scanner: the unread text of an answer, for readers that wait in the middle of a format.

Readers are generators, which yield when they need more text than has arrived. Their result depends
on the whole text only, and not on the pieces in which it arrived.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache

from dynamo.models.answers.alphabet import MarkerAlphabet, MarkerSet, split_at_marks

_find_space = re.compile(r"[ \t\r\n]*").match
MAX_NAME_CHARS = 256
"""Longer texts are not names of tools or parameters."""
MAX_REREAD_CHARS = 1 << 13
"""Longer text from which no call could be read becomes text at once: its markers are not obeyed."""

Waiting = Generator[None, None, None]
WaitingBool = Generator[None, None, bool]
WaitingText = Generator[None, None, str]


@lru_cache(maxsize=1024)
def marker_set(*markers: str) -> MarkerSet:
    """Return the set of these markers."""
    return MarkerSet(markers)


class Scanner:
    """The text that has arrived: `text`, of which `position` characters were read.

    A reader reads what it has seen before it waits, so that no character is looked at again with
    each piece that arrives. `return_to` makes text unread. `ended`: no more text will arrive;
    `cut`: because the answer was too long. `waits_in_text`: the reader waits outside of any format,
    and nothing is unread.
    """

    def __init__(self, alphabet: MarkerAlphabet) -> None:
        self.text = ""
        self.position = 0
        self._start = 0  # the place of `text` in the answer
        self.ended = False
        self.cut = False
        self.waits_in_text = False
        self.mark = alphabet.mark
        self._record: list[str] = []

    def add(self, piece: str) -> None:
        """Add text that has arrived."""
        self.text = self.text[self.position :] + piece
        self._start += self.position
        self.position = 0

    def take(self, length: int) -> str:
        """Read `length` characters."""
        return self.take_to(self.position + length)

    def take_to(self, end: int) -> str:
        """Read up to `end`, a position in `text`."""
        piece = self.text[self.position : end]
        self.position += len(piece)
        self._record.append(piece)
        return piece

    @property
    def offset(self) -> int:
        """How many characters of the answer were read."""
        return self._start + self.position

    @property
    def place(self) -> int:
        """The number of pieces that were read since the last `begin_record`."""
        return len(self._record)

    def return_to(self, place: int) -> int:
        """Return to an earlier place. Returns how many characters are unread again."""
        pieces = self._record[place:]
        del self._record[place:]
        length = sum(map(len, pieces))
        if length <= self.position:
            self.position -= length
        else:
            self._start = self.offset - length
            self.text, self.position = "".join(pieces) + self.text[self.position :], 0
        return length

    def put_back(self) -> None:
        """Take the last piece that was read back."""
        self.return_to(self.place - 1)

    def begin_record(self) -> None:
        """Forget what was read. `unread` returns to this place."""
        self._record.clear()

    def unread(self) -> int:
        """Return to the place of the last `begin_record`. Returns how many characters were read."""
        return self.return_to(0)

    def take_unmarked(self, length: int, markers: MarkerSet) -> str:
        """Read `length` characters, or less where a marker may begin at their end. Returns them
        with line breaks in the place of markers and special tokens."""
        piece = self.take(length)
        free = markers.partial(piece)
        self.put_back()
        return markers.replace("\n", "\n".join(split_at_marks(self.take(free))))

    def drop_record(self) -> None:
        """Forget what was read and everything that follows it."""
        self._record.clear()
        self.text, self.position = "", 0

    def more(self) -> WaitingBool:
        """Wait for more text. Returns False when the answer has ended."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> WaitingText:
        """Read white space. Returns the character behind it without reading it; "" at the end."""
        while True:
            space = _find_space(self.text, self.position)
            if space is not None and space[0]:
                self.take_to(space.end())
            if self.position < len(self.text):
                return self.text[self.position]
            if not (yield from self.more()):
                return ""

    def take_literal(self, *literals: str) -> WaitingText:
        """Read the one of `literals` that comes next. Returns "" if none does."""
        longest = max(map(len, literals))
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.position):
                    return self.take(len(literal))
            rest = self.text[self.position : self.position + longest]
            if not any(literal.startswith(rest) for literal in literals):
                return ""
            if not (yield from self.more()):
                return ""

    def take_ends(self, *literals: str) -> WaitingBool:
        """Forget what was read, and read each of `literals` that comes next. Returns True."""
        self.begin_record()
        for literal in literals:
            yield from self.peek()
            yield from self.take_literal(literal)
        return True

    def take_until(
        self, *markers: str, limit: int = MAX_NAME_CHARS
    ) -> Generator[None, None, tuple[str, str]]:
        """Read the next marker and the text before it, at most `limit` characters. Returns both.
        The marker is "" where none came; nothing is read then."""
        wanted, parts, place = marker_set(*markers), list[str](), self.place
        while True:
            match = wanted.search(self.text, self.position)
            end = wanted.partial(self.text, self.position) if match is None else match.start()
            parts.append(self.take_to(end))
            limit -= len(parts[-1])
            if match is not None and limit >= 0:
                return "".join(parts), self.take(len(match[0]))
            if limit < 0 or not (yield from self.more()):
                self.return_to(place)
                return "", ""

    def pass_until(
        self, markers: MarkerSet, sink: Callable[[str], None], *, outside: bool = False
    ) -> WaitingText:
        """Pass text to `sink` up to the next marker, and read the marker. Returns "" at the end.
        `outside`: the text belongs to no format."""
        while True:
            match = markers.search(self.text, self.position)
            if match is not None:
                if match.start() > self.position:
                    sink(self.take_to(match.start()))
                return self.take(len(match[0]))
            whole = self.ended and not self.cut
            free = len(self.text) if whole else markers.partial(self.text, self.position)
            if free > self.position:
                sink(self.take_to(free))
            self.waits_in_text = outside and self.position == len(self.text)
            if self.ended:
                self._pass_cut_rest(sink)
                return ""
            yield
            self.waits_in_text = False

    def _pass_cut_rest(self, sink: Callable[[str], None]) -> None:
        """Pass on the beginning of a marker that was cut, if it has only ordinary letters."""
        rest = self.take_to(len(self.text))
        if rest and len(split_at_marks(rest)) == 1:
            sink(rest)
