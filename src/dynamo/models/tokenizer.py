"""A model's tokenizer: text to packed ids and back, with tables for the hot path."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from math import inf
from pathlib import Path

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ModelUnavailable
from dynamo.models.encoders import Encoder, Verdict, best_encoder, prove, verdict
from dynamo.models.files import FileRef, file_ref, find
from dynamo.models.tokenizer_file import (
    AddedToken,
    TokenizerFile,
    byte_table,
    can_be_cut,
    read_tokenizer_file,
    special_ids,
)

_REPLACEMENT = "\ufffd"
COMPOSED_CHARS = 4
"""Of Unicode's composition (NFC): so many become one at most."""
HELD_TOKENS = 16
"""So many that are no text yet never become any: a character has four bytes."""


class Tokenizer:
    """`token_bytes[id]`: the token's exact bytes; None: only `decode` or `stream` know.

    `special_ids`: tokens that stand for no text. `may_cut`: see `segments`.
    """

    def __init__(self, encoder: Encoder, file: TokenizerFile, cuts_proven: bool = False) -> None:
        self._encoder = encoder
        self.added_tokens: tuple[AddedToken, ...] = file.added_tokens
        self.special_ids = special_ids(file)
        self.token_bytes: list[bytes | None] = byte_table(file)
        self.may_cut = cuts_proven and can_be_cut(file)
        self._composed = COMPOSED_CHARS if file.normalizer else 1

    @property
    def encoder(self) -> str:
        """The library that encodes."""
        return self._encoder.name

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self.token_bytes)

    def chars_of(self, tokens: int) -> float:
        """More characters than so many make more than `tokens` tokens, in each text that this
        tokenizer can say at all; infinity where that is not known."""
        if not self.may_cut:
            return inf
        return tokens * self._composed * max(len(raw) for raw in self.token_bytes if raw)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> bytes:
        """Packed u32 ids. `add_special`: with the tokenizer's own frame (BOS). `parse_special`:
        special tokens written in the text count as such. Raises InvalidRequest (not Unicode)."""
        ids = self._encoder.encode(text, parse_special)
        if not add_special:
            return ids
        before, after = self.frame
        return before + ids + after

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of whole `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._encoder.decode(ids, skip_special)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's string for an id (in the tokenizer's own alphabet)."""
        return self._encoder.id_to_token(token_id)

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """An incremental decoder for tokenizers without exact token bytes."""
        return StreamDecoder(self, skip_special)

    @cached_property
    def whole_text(self) -> list[str | None]:
        """The text of each id that decodes alone to whole UTF-8, special ones included; None for
        the others, where a neighbour may be needed."""
        return [_text(raw) for raw in self.token_bytes]

    @cached_property
    def whole_text_ids(self) -> list[int]:
        """Ids that decode alone to whole, non-empty text and are not special."""
        if any(raw is not None for raw in self.token_bytes):
            return _readable(self.token_bytes, self.special_ids)
        texts = (self._alone(number) for number in range(self.vocab_size))
        return [n for n, text in enumerate(texts) if text and n not in self.special_ids]

    @cached_property
    def frame(self) -> tuple[bytes, bytes]:
        """Packed ids that stand before and behind a bare prompt (BOS)."""
        framed, bare = self._encoder.framed("a"), self._encoder.encode("a")
        at = framed.find(bare)
        if at < 0:
            raise ModelUnavailable("the tokenizer changes the text that it frames")
        return framed[:at], framed[at + len(bare) :]

    def _alone(self, token_id: int) -> str | None:
        text = self.decode([token_id])
        return None if _REPLACEMENT in text else text


class StreamDecoder:
    """Gives the new text of each id; holds back until characters are whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._decode = tokenizer.decode
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._told = 0

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        before = self._text(self._ids[: self._told])
        now = self._text(self._ids)
        endless = len(self._ids) - self._told >= HELD_TOKENS
        if len(now) <= len(before):
            if endless:
                del self._ids[self._told :]
            return ""
        if now.endswith(_REPLACEMENT) and not endless:
            return ""
        self._ids = self._ids[self._told :]  # what was told last stays: decoding looks back on it
        self._told = len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is still held back (an incomplete character as U+FFFD)."""
        before = self._text(self._ids[: self._told])
        now = self._text(self._ids)
        self._told = len(self._ids)
        return now[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._decode(ids, skip_special=self._skip_special)


async def load_tokenizer(
    source: FileRef | Path, *, clock: Clock | None = None, proven: bool = False
) -> Tokenizer:
    """Load off the loop. `proven`: make the encoder's proof if there is none (seconds, once).

    Raises ModelUnavailable when the content is not on this host, or not usable.
    """
    return await (clock or SystemClock()).offload(read_tokenizer, source, proven=proven)


def read_tokenizer(source: FileRef | Path, *, proven: bool = False) -> Tokenizer:
    """`load_tokenizer`, blocking."""
    ref = file_ref(source) if isinstance(source, Path) else source
    path = find(ref)
    if path is None:
        raise ModelUnavailable(
            f"the tokenizer {ref.name} is not on this host", hint="fetch it from a worker first"
        )
    tokenizer = _parse(path, prove(ref) if proven else verdict(ref))
    _return_memory()
    return tokenizer


def _parse(path: Path, found: Verdict | None) -> Tokenizer:
    file = read_tokenizer_file(path)
    return Tokenizer(best_encoder(path, found), file, found is not None and found.cuts)


def readable_ids(source: FileRef | Path) -> list[int]:
    """`Tokenizer.whole_text_ids`, without loading an encoder where token bytes are exact.

    Blocks for milliseconds. Raises ModelUnavailable.
    """
    path = source if isinstance(source, Path) else find(source)
    if path is None:
        raise ModelUnavailable("the tokenizer is not on this host")
    file = read_tokenizer_file(path)
    table = byte_table(file)
    if any(raw is not None for raw in table):
        return _readable(table, special_ids(file))
    return read_tokenizer(source).whole_text_ids


def _return_memory() -> None:
    """Parsing a vocabulary leaves some 30 MB of free heap, which glibc gives back only if asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _readable(table: list[bytes | None], special: frozenset[int]) -> list[int]:
    return [n for n, raw in enumerate(table) if raw and _text(raw) and n not in special]


def _text(raw: bytes | None) -> str | None:
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
