"""Token ids to text: a table where it is exact, the tokenizer's own incremental decoder where it
is not."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Protocol

from dynamo.core.codec import unpack_ids
from dynamo.models.tokenization.tokenizer import Tokenizer

Utf8Decoder = getincrementaldecoder("utf-8")
BYTE_TOKEN_PATTERN = re.compile("<0x([0-9A-F]{2})>")
"""How vocabularies name a token that is one byte."""


class TextDecoder(Protocol):
    """Ids in, text out, for one answer. A character is never split: its bytes wait."""

    @property
    def has_pending(self) -> bool:
        """The next token cannot be read by itself, because something is held back."""

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; "" if it completes none."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that stayed incomplete."""


class Vocabulary:
    """What every answer of one model reads. Reads the whole tokenizer once: milliseconds.

    `texts[id]`: the token's text where the id alone is whole, non-empty text and not special, else
    None. `shown[id]`: the same with special tokens as text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes: Sequence[bytes | None] = tokenizer.token_bytes
        self._exact = any(raw is not None for raw in self._token_bytes)
        self._bytes_cache: dict[int, bytes] = {}
        self.special_ids = tokenizer.special_ids
        self.texts_with_special = [text or None for text in tokenizer.token_texts]
        self.texts = [
            None if token_id in self.special_ids else text
            for token_id, text in enumerate(self.texts_with_special)
        ]

    def create_decoder(self, *, skip_special: bool) -> TextDecoder:
        """A decoder for one answer; special tokens that are skipped need not be given to it."""
        if self._exact:
            return TableDecoder(self._token_bytes)
        return TokenizerDecoder(self._tokenizer, skip_special=skip_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Of whole `ids`, special tokens included. On a thread the table lets others run meanwhile;
        a library that decodes does not."""
        raw = self._token_bytes
        if not self._exact:
            return self._tokenizer.decode(ids)
        known = len(raw)
        parts = [raw[token_id] or b"" for token_id in ids if token_id < known]
        return b"".join(parts).decode(errors="replace")

    def get_token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, as well as they are known."""
        if token_id >= len(self._token_bytes):
            return b""
        if self._exact:
            return self._token_bytes[token_id] or b""
        found = self._bytes_cache.get(token_id)
        if found is None:
            found = self._bytes_cache[token_id] = self._decode_behind_token(token_id)
        return found

    def _decode_behind_token(self, token_id: int) -> bytes:
        """As it is behind another token: of the first one decoders drop the space in front."""
        decode, before = self._tokenizer.decode, unpack_ids(self._tokenizer.encode("a"))
        text = decode([*before, token_id])[len(decode(before)) :]
        byte = BYTE_TOKEN_PATTERN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return bytes.fromhex(byte[1]) if byte and "\ufffd" in text else text.encode()


class TableDecoder:
    """Bytes from the table through Python's UTF-8 decoder, whose U+FFFD are those of the
    reference decoder (Rust's from_utf8_lossy)."""

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, raw: Sequence[bytes | None]) -> None:
        self._token_bytes = raw
        self._decoder = Utf8Decoder("replace")

    @property
    def has_pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def step(self, token_id: int) -> str:
        raw = self._token_bytes[token_id] if token_id < len(self._token_bytes) else None
        return self._decoder.decode(raw) if raw else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerDecoder:
    """The tokenizer's own; every token needs those before it."""

    __slots__ = ("_stream", "flush", "step")

    has_pending = True

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        stream = tokenizer.stream_decoder(skip_special=skip_special)
        self.step = stream.step
        self.flush = stream.flush
