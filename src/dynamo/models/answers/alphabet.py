"""Special tokens as single characters, which text of ordinary tokens never contains.

A reader of answers sees text in which each special token is one lone surrogate. Decoded text has no
lone surrogates. A marker that is a token of the vocabulary is therefore only found where the model
wrote that token, and never where it wrote the same letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

from dynamo.models.tokenization.tokenizer_file import AddedToken

_FIRST = 0xD800
_MAX_TOKENS = 0x800
_MARKS = re.compile("[\ud800-\udfff]")


class MarkerSet:
    """Markers to look for. No marker is the beginning of another one. `longest`: a length."""

    def __init__(self, markers: Sequence[str]) -> None:
        pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        self.search, self.replace = pattern.search, pattern.sub
        self._beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self.longest = max(map(len, markers), default=1)

    def partial(self, text: str, start: int = 0) -> int:
        """Return where the longest suffix of `text[start:]` that may become a marker begins in
        `text`, else len(text)."""
        length = len(text)
        for size in range(min(self.longest - 1, length - start), 0, -1):
            if text[length - size :] in self._beginnings:
                return length - size
        return length


class MarkerAlphabet:
    """The characters of special tokens, and markers written with them.

    `chars` maps token ids to characters. It has all special tokens, and other added tokens that are
    part of one of `markers`. `literals` are all of these and the markers in letters.
    """

    def __init__(self, tokens: Iterable[AddedToken], markers: Sequence[str]) -> None:
        self.markers = tuple(markers)
        parts = [
            token for token in tokens if any(token.content in marker for marker in self.markers)
        ]
        others = [token for token in tokens if token.special and token not in parts]
        known = [token for token in (*parts, *others) if token.content][:_MAX_TOKENS]
        self.chars = {token.id: chr(_FIRST + number) for number, token in enumerate(known)}
        self.literals = tuple(dict.fromkeys((*markers, *(token.content for token in parts))))
        self._contents = {chr(_FIRST + number): token.content for number, token in enumerate(known)}
        self._rests = lru_cache(maxsize=64)(self._find_rests)
        by_length = sorted(parts, key=lambda token: -len(token.content))
        self._parts = [
            (token.content, self.chars[token.id]) for token in by_length if token.id in self.chars
        ]

    def mark(self, literal: str) -> str:
        """Return a marker as it occurs in the text: its tokens are single characters."""
        for content, char in self._parts:
            literal = literal.replace(content, char)
        return literal

    def split(self, text: str) -> list[str | int]:
        """Return the parts of a text: the ids of tokens that belong to markers, and letters."""
        ids = {char: token for token, char in self.chars.items()}
        parts = _MARKS.sub(lambda match: f"\0{match[0]}\0", self.mark(text)).split("\0")
        return [ids.get(part, part) for part in parts if part]

    def literal(self, text: str) -> str:
        """Return text with the letters of its special tokens."""
        if text.isascii():
            return text
        return _MARKS.sub(lambda match: self._contents.get(match[0], ""), text)

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """The markers and all special tokens in letters."""
        return tuple(dict.fromkeys((*self.literals, *self._contents.values())))

    @cached_property
    def letters(self) -> MarkerSet:
        """The set of `spellings`."""
        return MarkerSet(self.spellings)

    def rests_behind(self, text: str) -> frozenset[str]:
        """Return the rests of all markers that the end of `text` may have begun."""
        return self._rests(text[self.letters.partial(text) :])

    def _find_rests(self, beginning: str) -> frozenset[str]:
        return frozenset(
            marker[size:]
            for marker in self.spellings
            for size in range(1, len(marker))
            if beginning.endswith(marker[:size])
        )


def split_at_marks(text: str) -> Sequence[str]:
    """Return the parts of a text between its special tokens."""
    return (text,) if text.isascii() else _MARKS.split(text)


def escape_surrogates(json_text: str) -> str:
    """Return a JSON text whose lone surrogates, which UTF-8 does not have, are escapes."""
    if json_text.isascii():
        return json_text
    return _MARKS.sub(lambda match: f"\\u{ord(match[0]):04x}", json_text)
