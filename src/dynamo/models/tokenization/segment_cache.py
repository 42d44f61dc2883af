"""Encodes long and growing texts piece by piece, and never the same piece twice.

A text is cut at added tokens, and inside long plain text at the first safe place after each
`CUT_CHARS` characters, counted from the segment's start: a conversation that grows is cut at the
same places again, so only its new tail is encoded. Exactness: see `tokenizer_file.can_be_cut`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from sys import getsizeof
from threading import Lock
from typing import cast

from dynamo.models.tokenization.tokenizer import Tokenizer

SEGMENT_CHARS = 2048
CUT_SEARCH_CHARS = 8192
_LETTERS = "A-Za-zÀ-ÖØ-öø-ƺΑ-Ωα-ωА-яא-תء-ي一-龥ぁ-ゖァ-ヺ가-힣"
SAFE_CUT = re.compile(f"[{_LETTERS}](?= [{_LETTERS}]|\\n|[、。，])")  # noqa: RUF001
"""Ends where every pre-tokenizer of byte-level BPE ends one too: after a letter, before white space
or before a mark that only ends words. Letters are those that every version of Unicode knows."""
_DICT_ENTRY_BYTES = 150  # of a dict that may just have grown
_MAX_LOOKUP_CHARS = 1 << 18
UNCACHED_TEXT_CHARS = 1280
"""A text up to this length is encoded as it is: to look for its pieces would pay only where one in
four of such texts was said before."""


class TextSplitter:
    """Cuts texts. `specials`: contents of the added tokens."""

    def __init__(self, specials: Iterable[str], cut_chars: int = SEGMENT_CHARS) -> None:
        self._cut_chars = cut_chars
        words = sorted(specials, key=len, reverse=True)  # the longest where several begin
        self._split_at_specials = (
            re.compile(f"({'|'.join(map(re.escape, words))})").split if words else _as_one_piece
        )

    def split(self, text: str) -> list[str]:
        """The pieces of `text`, added tokens apart; their concatenation is `text`."""
        parts = self._split_at_specials(text)
        if len(text) <= self._cut_chars or max(map(len, parts)) <= self._cut_chars:
            return list(filter(None, parts))
        found: list[str] = []
        for number, part in enumerate(parts):
            if number % 2:  # an added token
                found.append(part)
            else:
                self._split_long_text(part, found)
        return found

    def _split_long_text(self, text: str, found: list[str]) -> None:
        start, end, size = 0, len(text), self._cut_chars
        while end - start > size:
            place = SAFE_CUT.search(
                text, start + size - 1, min(end, start + size + CUT_SEARCH_CHARS)
            )
            if place is None or place.end() == end:
                break
            found.append(text[start : place.end()])
            start = place.end()
        if start < end:
            found.append(text[start:end])


def _as_one_piece(text: str) -> list[str]:
    return [text]


_SECRET_HASH = sys.flags.hash_randomization and sys.hash_info.algorithm.startswith("siphash")
_segment_key: Callable[[str], Hashable] = hash if _SECRET_HASH else str
"""What stands for a piece: 64 bits of SipHash under a secret of this process, which nobody outside
can make collide (by chance, one of 10^4 pieces with a new one: 5 in 10^16); else its text."""


_SegmentLookup = tuple[list[str], list[Hashable], list[bytes | None]]
"""A text's pieces, their keys, and the ids of those that were known."""


class SegmentCache:
    """Encodes through a cache of pieces of at most `capacity_bytes` (keys, ids and bookkeeping
    counted): 4 to 5 bytes a token of long texts, no text. Safe to use from several threads.

    Two generations: a piece used since the last turn is in the young one; when that holds half of
    the capacity it becomes the old one, and what was old is dropped. A hit costs one look-up.
    """

    def __init__(self, tokenizer: Tokenizer, capacity_bytes: int = 4 << 20) -> None:
        self._encode = tokenizer.encode
        self._splitter: TextSplitter | None = None
        if tokenizer.can_split:
            self._splitter = TextSplitter(token.content for token in tokenizer.added_tokens)
        self._half_bytes = capacity_bytes // 2
        self._young: dict[Hashable, bytes] = {}
        self._old: dict[Hashable, bytes] = {}
        self._young_bytes = 0
        self._old_bytes = 0
        self._lock = Lock()
        self._last_lookup: tuple[str, _SegmentLookup] | None = None
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        """What the cache holds now."""
        return self._young_bytes + self._old_bytes

    def encode(self, text: str) -> bytes:
        """Packed ids of `text`, special tokens read as such; equal to `Tokenizer.encode(text)`."""
        if len(text) <= UNCACHED_TEXT_CHARS:
            return self._encode(text)
        planned, self._last_lookup = self._last_lookup, None
        if planned is not None and planned[0] is text:
            pieces, keys, parts = planned[1]
        else:
            pieces, keys, parts = self._look_up(text)
        fresh: dict[Hashable, bytes] = {}
        for number, ids in enumerate(parts):
            if ids is None:
                key = keys[number]
                if key not in fresh:
                    fresh[key] = self._encode(pieces[number])
                parts[number] = fresh[key]
        self.misses += len(fresh)
        self.hits += len(pieces) - len(fresh)
        if fresh:
            self._insert(fresh)
        return b"".join(cast("list[bytes]", parts))

    def uncached_chars(self, text: str) -> int:
        """How many characters `encode` would have to encode now: what it will cost.

        For a text so long that even looking would delay a loop: all of them.
        """
        if len(text) > _MAX_LOOKUP_CHARS or len(text) <= UNCACHED_TEXT_CHARS:
            return len(text)
        plan = self._look_up(text)
        self._last_lookup = (text, plan)
        pieces, _, parts = plan
        return sum([len(piece) for piece, ids in zip(pieces, parts, strict=True) if ids is None])

    def _look_up(self, text: str) -> _SegmentLookup:
        pieces = [text] if self._splitter is None else self._splitter.split(text)
        keys = list(map(_segment_key, pieces))
        parts = list(map(self._young.get, keys))
        if self._old and None in parts:
            self._look_up_old(keys, parts)
        return pieces, keys, parts

    def _look_up_old(self, keys: list[Hashable], parts: list[bytes | None]) -> None:
        used: dict[Hashable, bytes] = {}
        old = self._old
        for number, ids in enumerate(parts):
            if ids is None and (kept := old.get(keys[number])) is not None:
                parts[number] = used[keys[number]] = kept
        if used:
            self._insert(used)

    def _insert(self, fresh: Mapping[Hashable, bytes]) -> None:
        with self._lock:
            for key, ids in fresh.items():
                size = getsizeof(key) + getsizeof(ids) + _DICT_ENTRY_BYTES
                if key in self._young or size > self._half_bytes:
                    continue
                if self._old.pop(key, None) is not None:
                    self._old_bytes -= size
                if self._young_bytes + size > self._half_bytes:
                    self._old, self._old_bytes = self._young, self._young_bytes
                    self._young, self._young_bytes = {}, 0
                self._young[key] = ids
                self._young_bytes += size
