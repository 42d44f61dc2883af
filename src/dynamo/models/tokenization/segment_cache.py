"""A cache of encoded text segments, for long texts and growing conversations.

A text is split at added tokens. Long plain text is also split at the first safe place after each
`SEGMENT_CHARS` characters, counted from the segment's start. A growing conversation is therefore
split at the same places again, and only its new tail is encoded. For the conditions under which
the ids stay exact see `tokenizer_file.can_split_text`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from math import inf
from sys import getsizeof
from threading import Lock
from typing import cast

from dynamo.core.errors import ContextLengthExceeded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.models.tokenization.tokenizer import Tokenizer

SEGMENT_CHARS = 2048
CUT_SEARCH_CHARS = 8192
_LETTERS = "A-Za-zÀ-ÖØ-öø-ƺΑ-Ωα-ωА-яא-תء-ي一-龥ぁ-ゖァ-ヺ가-힣"
SAFE_CUT = re.compile(f"[{_LETTERS}](?= [{_LETTERS}]|\\n|[、。，])")  # noqa: RUF001
"""Matches a letter after which every pre-tokenizer of byte-level BPE ends a pre-token.

White space or a mark that only ends words follows. Every version of Unicode has these letters."""
_DICT_ENTRY_BYTES = 150  # in a dict that may just have grown
_MAX_LOOKUP_CHARS = 1 << 18
UNCACHED_TEXT_CHARS = 1280
"""Texts up to this length are not cached. A cache would pay only if one in four occurred before."""


class TextSplitter:
    """Splits texts. `specials` are the contents of the added tokens."""

    def __init__(self, specials: Iterable[str], cut_chars: int = SEGMENT_CHARS) -> None:
        self._cut_chars = cut_chars
        tokens = sorted(specials, key=len, reverse=True)  # the longest match comes first
        self._split_at_specials = (
            re.compile(f"({'|'.join(map(re.escape, tokens))})").split if tokens else _unsplit
        )

    def split(self, text: str) -> list[str]:
        """Return the segments of `text`, in order and complete. Added tokens are separate."""
        parts = self._split_at_specials(text)
        if len(text) <= self._cut_chars or max(map(len, parts)) <= self._cut_chars:
            return list(filter(None, parts))
        segments: list[str] = []
        for number, part in enumerate(parts):
            if number % 2:  # an added token
                segments.append(part)
            else:
                self._split_long_text(part, segments)
        return segments

    def _split_long_text(self, text: str, segments: list[str]) -> None:
        start, end, size = 0, len(text), self._cut_chars
        while end - start > size:
            cut = SAFE_CUT.search(text, start + size - 1, min(end, start + size + CUT_SEARCH_CHARS))
            if cut is None or cut.end() == end:
                break
            segments.append(text[start : cut.end()])
            start = cut.end()
        if start < end:
            segments.append(text[start:end])


def _unsplit(text: str) -> list[str]:
    return [text]


_SECRET_HASH = sys.flags.hash_randomization and sys.hash_info.algorithm.startswith("siphash")
_segment_key: Callable[[str], Hashable] = hash if _SECRET_HASH else str
"""The cache key of a segment: its 64-bit SipHash if that is keyed, else its text.

Clients cannot produce collisions under a secret key. By chance a new segment collides with one of
10^4 with probability 5 in 10^16."""


_SegmentLookup = tuple[list[str], list[Hashable], list[bytes | None]]
"""The segments of a text, their keys, and the packed ids of the cached ones."""


class SegmentCache:
    """Encodes texts and caches the ids of their segments. Thread-safe.

    The cache takes at most `capacity_bytes`, bookkeeping included: 4 to 5 bytes a token of long
    texts. A used segment is in the young generation. When that holds half of the capacity, it
    replaces the old generation, whose segments are dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        capacity_bytes: int = 4 << 20,
        max_segment_chars: float = inf,
        max_tokens: float = inf,
    ) -> None:
        self._encode = tokenizer.encode
        self._splitter: TextSplitter | None = None
        if tokenizer.can_split:
            self._splitter = TextSplitter(token.content for token in tokenizer.added_tokens)
        self._max_segment_chars = max_segment_chars
        self._max_tokens = max_tokens
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
        """The present size of the cache."""
        return self._young_bytes + self._old_bytes

    def split(self, text: str) -> list[str]:
        """Return the segments of `text`, or the text alone if it cannot be split."""
        return [text] if self._splitter is None else self._splitter.split(text)

    def encode(self, text: str) -> bytes:
        """Return the packed ids of `text`, equal to `Tokenizer.encode(text)`.

        Raises `ContextLengthExceeded` for a segment of more than `max_segment_chars`, and as soon
        as the segments that are not cached have more than `max_tokens`.
        """
        if len(text) <= UNCACHED_TEXT_CHARS:
            return self._encode(text)
        last, self._last_lookup = self._last_lookup, None
        if last is not None and last[0] is text:
            segments, keys, packed_ids = last[1]
        else:
            segments, keys, packed_ids = self._look_up(text)
        if len(text) > self._max_segment_chars and self._splitter is not None:
            _check_uncut_chars(max(map(len, segments)), self._max_segment_chars)
        new: dict[Hashable, bytes] = {}
        new_tokens = 0
        for number, ids in enumerate(packed_ids):
            if ids is None:
                key = keys[number]
                if key not in new:
                    new[key] = self._encode(segments[number])
                packed_ids[number] = new[key]
                new_tokens += len(new[key]) // TOKEN_BYTES
                if new_tokens > self._max_tokens:
                    raise _too_many_tokens(self._max_tokens)
        self.misses += len(new)
        self.hits += len(segments) - len(new)
        if new:
            self._insert(new)
        return b"".join(cast("list[bytes]", packed_ids))

    def uncached_chars(self, text: str) -> int:
        """Return how many characters `encode` would have to encode now.

        All characters count for a text that is too long for a look-up on the event loop.
        """
        if len(text) > _MAX_LOOKUP_CHARS or len(text) <= UNCACHED_TEXT_CHARS:
            return len(text)
        lookup = self._look_up(text)
        self._last_lookup = (text, lookup)
        segments, _, cached = lookup
        return sum([len(part) for part, ids in zip(segments, cached, strict=True) if ids is None])

    def _look_up(self, text: str) -> _SegmentLookup:
        segments = self.split(text)
        keys = list(map(_segment_key, segments))
        packed_ids = list(map(self._young.get, keys))
        if self._old and None in packed_ids:
            self._look_up_old(keys, packed_ids)
        return segments, keys, packed_ids

    def _look_up_old(self, keys: list[Hashable], packed_ids: list[bytes | None]) -> None:
        used: dict[Hashable, bytes] = {}
        old = self._old
        for number, ids in enumerate(packed_ids):
            if ids is None and (old_ids := old.get(keys[number])) is not None:
                packed_ids[number] = used[keys[number]] = old_ids
        if used:
            self._insert(used)

    def _insert(self, new: Mapping[Hashable, bytes]) -> None:
        with self._lock:
            for key, ids in new.items():
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


def _too_many_tokens(limit: float) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's context is {limit:.0f} tokens, and the prompt alone has more",
        hint="shorten the prompt and leave room for the answer",
        param="prompt",
    )


def _check_uncut_chars(chars: int, limit: float) -> None:
    """Raise `ContextLengthExceeded` for a segment of more than `limit` characters."""
    if chars > limit:
        raise ContextLengthExceeded(
            f"the text has {chars} characters without a word boundary, at most {limit} are encoded",
            hint="send a shorter text",
            param="prompt",
        )
