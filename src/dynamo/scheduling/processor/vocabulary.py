"""Token ids to text, by a table of bytes where it is exact, else by the tokenizer's decoder."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence

from dynamo.core.codec import unpack_ids
from dynamo.core.fast_path import TokenTexts
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.text import MAX_CUT_BYTES, REPLACEMENT
from dynamo.models.tokenization.tokenizer import Tokenizer

Utf8Decoder = getincrementaldecoder("utf-8")
BYTE_TOKEN_PATTERN = re.compile("<0x([0-9A-F]{2})>")
"""The name of a single-byte token in vocabularies."""


class Vocabulary:
    """The texts of a model's tokens. The constructor reads the whole tokenizer in milliseconds.

    `token_texts` has a token's text if its id alone is whole, non-empty text and not special, else
    None. `token_texts_with_special` has the texts of special tokens, too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes: Sequence[bytes | None] = tokenizer.token_bytes
        self._exact = tokenizer.has_exact_bytes
        self._bytes_cache: dict[int, bytes] = {}
        self.special_ids = tokenizer.special_ids
        texts = [text or None for text in tokenizer.token_texts]
        self.token_texts_with_special = TokenTexts(texts)
        self.token_texts = TokenTexts(
            [None if number in self.special_ids else text for number, text in enumerate(texts)]
        )

    def create_decoder(
        self, *, skip_special: bool, prompt_end: bytes = b"", at_start: bool = True
    ) -> TextDecoder:
        """Return a decoder for one answer. Skipped special tokens need not be passed to it.

        `prompt_end`: the last packed ids of the prompt. `at_start`: no text of the answer precedes.
        """
        if not self._exact:
            end = unpack_ids(prompt_end)
            return TokenizerDecoder(self, self._tokenizer, end, skip_special=skip_special)
        decoder = TableDecoder(self._token_bytes)
        for token in unpack_ids(prompt_end[-MAX_CUT_BYTES * TOKEN_BYTES :]) if at_start else ():
            decoder.step(token)  # the answer may complete a character
        return decoder

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids including special tokens. On a thread the table releases the GIL from time to
        time, unlike a tokenizer library."""
        raw = self._token_bytes
        if not self._exact:
            return self._tokenizer.decode(ids)
        known = len(raw)
        parts = [raw[token_id] or b"" for token_id in ids if token_id < known]
        return b"".join(parts).decode(errors="replace")

    def get_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, as well as they are known."""
        if token_id >= len(self._token_bytes):
            return b""
        if self._exact:
            return self._token_bytes[token_id] or b""
        if token_id not in self._bytes_cache:
            self._bytes_cache[token_id] = self._decode_behind_text(token_id)
        return self._bytes_cache[token_id]

    def _decode_behind_text(self, token_id: int) -> bytes:
        text = self._tokenizer.decode_behind_text([token_id])
        byte = BYTE_TOKEN_PATTERN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return bytes.fromhex(byte[1]) if byte and REPLACEMENT in text else text.encode()


class TableDecoder:
    """Decode table bytes with Python's UTF-8 decoder, which places U+FFFD like the reference
    decoder (Rust's from_utf8_lossy).

    `step` returns the text that a token completes. The bytes of an incomplete character are held
    back. While `has_pending`, the next token cannot be decoded alone. `flush` returns the rest
    where other text follows, `end` at the end of an answer: without an incomplete character.
    """

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

    def end(self) -> str:
        self._decoder.reset()
        return ""


class TokenizerDecoder:
    """The tokenizer's own decoder, used like `TableDecoder`. Every token depends on those before
    it."""

    has_pending = True

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        prompt_end: Sequence[int],
        *,
        skip_special: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._stream = stream = tokenizer.stream_decoder(
            skip_special=skip_special, prompt_end=prompt_end
        )
        self.step = stream.step
        self.flush = stream.flush

    def end(self) -> str:
        utf8 = Utf8Decoder("replace")
        utf8.decode(b"".join(map(self._vocabulary.get_token_bytes, self._stream.pending_ids)))
        text, incomplete = self.flush(), len(utf8.getstate()[0])
        while incomplete and text.endswith(REPLACEMENT):  # for each byte, or for all of them
            text, incomplete = text[:-1], incomplete - 1
        return text


TextDecoder = TableDecoder | TokenizerDecoder
"""The incremental decoder of one answer."""
