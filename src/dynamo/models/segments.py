"""Encodes long and growing texts piece by piece, and never the same piece twice.

A text is cut at added tokens, and inside long plain text at the first safe place after each
`CUT_CHARS` characters, counted from the segment's start: a conversation that grows is cut at the
same places again, so only its new tail is encoded. Exactness: see `tokenizer_file.can_be_cut`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from sys import getsizeof
from threading import Lock
from typing import NamedTuple

from dynamo.models.tokenizer import Tokenizer

CUT_CHARS = 2048
SEARCH_CHARS = 8192
_LETTERS = "A-Za-zÀ-ÖØ-öø-ƺΑ-Ωα-ωА-яא-תء-ي一-龥ぁ-ゖァ-ヺ가-힣"
SAFE_CUT = re.compile(f"[{_LETTERS}](?= [{_LETTERS}]|\\n|[、。，])")  # noqa: RUF001
"""Ends where every pre-tokenizer of byte-level BPE ends one too: after a letter, before white space
or before a mark that only ends words. Letters are those that every version of Unicode knows."""
_ENTRY_BYTES = 150  # of a dict that may just have grown
_MISSES = 64
_LOOK_CHARS = 1 << 18


class Splitter:
    """Cuts texts. `specials`: contents of the added tokens."""

    def __init__(self, specials: Iterable[str], cut_chars: int = CUT_CHARS) -> None:
        self._cut_chars = cut_chars
        self._search = SpecialSearch(specials)

    def pieces(self, text: str) -> list[str]:
        """The pieces of `text`, added tokens apart; their concatenation is `text`."""
        found: list[str] = []
        start = 0
        for at, end in self._search.spans(text):
            self._cut(text, start, at, found)
            found.append(text[at:end])
            start = end
        self._cut(text, start, len(text), found)
        return found

    def _cut(self, text: str, start: int, end: int, found: list[str]) -> None:
        size = self._cut_chars
        while end - start > size:
            place = SAFE_CUT.search(text, start + size - 1, min(end, start + size + SEARCH_CHARS))
            if place is None or place.end() == end:
                break
            found.append(text[start : place.end()])
            start = place.end()
        if start < end:
            found.append(text[start:end])


class SpecialSearch:
    """Finds added tokens, the longest where several begin."""

    def __init__(self, specials: Iterable[str]) -> None:
        words = sorted(specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words))) if words else None
        firsts = {word[0] for word in words}
        self._first = firsts.pop() if len(firsts) == 1 else ""

    def spans(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of each, in order.

        When all begin alike, `str.find` leaps from one such character to the next, many times
        faster than a pattern's search, unless they are dense.
        """
        if self._pattern is None:
            return []
        found: list[tuple[int, int]] = []
        start, misses = 0, 0
        if self._first:
            match, find, first = self._pattern.match, text.find, self._first
            start = find(first)
            while start >= 0 and misses < _MISSES:
                if hit := match(text, start):
                    found.append(hit.span())
                    start = find(first, hit.end())
                else:
                    misses += 1
                    start = find(first, start + 1)
        if start >= 0:
            found += [hit.span() for hit in self._pattern.finditer(text, start)]
        return found


class _Plan(NamedTuple):
    """A text, its pieces, and the ids of those that were known."""

    text: str
    pieces: list[str]
    parts: list[bytes | None]


_NO_PLAN = _Plan("", [], [])


class SegmentCache:
    """Encodes through a cache of pieces of at most `capacity_bytes` (keys, ids and bookkeeping
    counted). Safe to use from several threads.

    Two generations: a piece used since the last turn is in the young one; when that holds half of
    the capacity it becomes the old one, and what was old is dropped. A hit costs one look-up.
    """

    def __init__(self, tokenizer: Tokenizer, capacity_bytes: int = 24 << 20) -> None:
        self._encode = tokenizer.encode
        self._splitter: Splitter | None = None
        if tokenizer.may_cut:
            self._splitter = Splitter(token.content for token in tokenizer.added_tokens)
        self._half_bytes = capacity_bytes // 2
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self._young_bytes = 0
        self._old_bytes = 0
        self._turning = Lock()
        self._planned = _NO_PLAN
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        """What the cache holds now."""
        return self._young_bytes + self._old_bytes

    def encode(self, text: str) -> bytes:
        """Packed ids of `text`, special tokens read as such; equal to `Tokenizer.encode(text)`."""
        _, pieces, parts = self._plan(text)
        self._planned = _NO_PLAN
        together = list(zip(pieces, parts, strict=True))
        fresh = {piece: b"" for piece, ids in together if ids is None}
        for piece in fresh:
            fresh[piece] = self._encode(piece)
        self.misses += len(fresh)
        self.hits += len(pieces) - len(fresh)
        if fresh:
            self._keep(fresh)
        return b"".join([fresh[piece] if ids is None else ids for piece, ids in together])

    def missing_chars(self, text: str) -> int:
        """How many characters `encode` would have to encode now: what it will cost.

        For a text so long that even looking would delay a loop: all of them.
        """
        if len(text) > _LOOK_CHARS:
            return len(text)
        _, pieces, parts = self._plan(text)
        return sum([len(piece) for piece, ids in zip(pieces, parts, strict=True) if ids is None])

    def _plan(self, text: str) -> _Plan:
        plan = self._planned
        if plan.text is not text:
            pieces = [text] if self._splitter is None else self._splitter.pieces(text)
            parts = list(map(self._young.get, pieces))
            if None in parts:
                self._look_in_old(pieces, parts)
            self._planned = plan = _Plan(text, pieces, parts)
        return plan

    def _look_in_old(self, pieces: list[str], parts: list[bytes | None]) -> None:
        used: dict[str, bytes] = {}
        old = self._old
        for number, ids in enumerate(parts):
            if ids is None and (kept := old.get(pieces[number])) is not None:
                parts[number] = used[pieces[number]] = kept
        if used:
            self._keep(used)

    def _keep(self, fresh: dict[str, bytes]) -> None:
        with self._turning:
            for piece, ids in fresh.items():
                size = getsizeof(piece) + getsizeof(ids) + _ENTRY_BYTES
                if piece in self._young or size > self._half_bytes:
                    continue
                if self._old.pop(piece, None) is not None:
                    self._old_bytes -= size
                if self._young_bytes + size > self._half_bytes:
                    self._old, self._old_bytes = self._young, self._young_bytes
                    self._young, self._young_bytes = {}, 0
                self._young[piece] = ids
                self._young_bytes += size
