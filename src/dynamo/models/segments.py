"""Encodes long and growing texts piece by piece, and never the same piece twice.

A text is cut at added tokens, and inside long plain text at the first safe place after each
`CUT_CHARS` characters, counted from the segment's start: a conversation that grows is cut at the
same places again, so only its new tail is encoded. Exactness: see `tokenizer_file.can_be_cut`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
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
_ENTRY_BYTES = 200


class Splitter:
    """Cuts texts. `specials`: contents of the added tokens."""

    def __init__(self, specials: Iterable[str], cut_chars: int = CUT_CHARS) -> None:
        self._cut_chars = cut_chars
        longest_first = sorted(specials, key=len, reverse=True)
        self._specials = _alternatives(longest_first) if longest_first else None

    def pieces(self, text: str) -> list[str]:
        """The pieces of `text`, added tokens apart; their concatenation is `text`."""
        found: list[str] = []
        start = 0
        if self._specials is not None:
            for special in self._specials.finditer(text):
                at, end = special.span()
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


class _Plan(NamedTuple):
    text: str
    pieces: Sequence[str]


class SegmentCache:
    """Encodes through a cache of pieces: least recently used out first, at most `capacity_bytes`
    (keys, ids and bookkeeping counted). Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, capacity_bytes: int = 64 << 20) -> None:
        self._encode = tokenizer.encode
        self._capacity = capacity_bytes
        self._splitter = (
            Splitter(token.content for token in tokenizer.added_tokens)
            if tokenizer.may_cut
            else None
        )
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self._planned = _Plan("", ())
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    def encode(self, text: str) -> bytes:
        """Packed ids of `text`, special tokens read as such; equal to `Tokenizer.encode(text)`."""
        pieces = self._plan(text).pieces
        known = self._ids
        with self._lock:
            parts = [known.get(piece) for piece in pieces]
            for piece, ids in zip(pieces, parts, strict=True):
                if ids is not None:
                    known.move_to_end(piece)
        fresh = {piece: b"" for piece, ids in zip(pieces, parts, strict=True) if ids is None}
        self.hits += len(parts) - len(fresh)
        self.misses += len(fresh)
        if not fresh:
            return b"".join(parts)  # type: ignore[arg-type]
        for piece in fresh:
            fresh[piece] = self._encode(piece)
        self._store(fresh)
        return b"".join([fresh[p] if i is None else i for p, i in zip(pieces, parts, strict=True)])

    def missing_chars(self, text: str) -> int:
        """How many characters `encode` would have to encode now: what it will cost."""
        known = self._ids
        return sum(len(piece) for piece in self._plan(text).pieces if piece not in known)

    def _plan(self, text: str) -> _Plan:
        plan = self._planned
        if plan.text is not text:
            pieces = [text] if self._splitter is None else self._splitter.pieces(text)
            self._planned = plan = _Plan(text, pieces)
        return plan

    def _store(self, fresh: dict[str, bytes]) -> None:
        with self._lock:
            for piece, ids in fresh.items():
                size = _size(piece, ids)
                if piece in self._ids or size > self._capacity // 4:
                    continue
                self._ids[piece] = ids
                self.size_bytes += size
            while self.size_bytes > self._capacity:
                self.size_bytes -= _size(*self._ids.popitem(last=False))


def _size(piece: str, ids: bytes) -> int:
    return getsizeof(piece) + getsizeof(ids) + _ENTRY_BYTES


def _alternatives(words: Sequence[str]) -> re.Pattern[str]:
    """A pattern of all `words`, a common first character in front: the search then skips fast."""
    first = words[0][0]
    if any(word[0] != first for word in words):
        return re.compile("|".join(map(re.escape, words)))
    rest = "|".join(re.escape(word[1:]) for word in words)
    return re.compile(f"{re.escape(first)}(?:{rest})")
