"""The tokenizer of a model: text to packed ids and back, with tables for the hot path."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import ModelUnavailable
from dynamo.models.file_cache import FileRef, file_ref, find_file
from dynamo.models.tokenization.encoders import (
    Encoder,
    EncoderVerification,
    cached_verification,
    fastest_encoder,
    verify_encoder,
)
from dynamo.models.tokenization.tokenizer_file import (
    AddedToken,
    TokenizerFile,
    can_split_text,
    read_tokenizer_file,
    special_ids,
    token_bytes_table,
)

_REPLACEMENT = "\ufffd"
MAX_COMPOSED_CHARS = 4
"""Unicode's composition (NFC) combines at most this many characters to one."""
MAX_INCOMPLETE_TOKENS = 16
"""This many ids without whole text never become text, since a character has four bytes."""
_CONTEXT_TOKENS = 4
"""At least so many ids of a prompt are decoded before an answer, and as many as are whole text."""
_MAX_CUT_TOKENS = 3
"""At most so many ids at the end of a prompt begin a character."""
_TEXTS_BEFORE = ("\n", "a", ".", "0")
"""A text is encoded behind one of these, to have none of what tokenizers add to a beginning."""


class Tokenizer:
    """A tokenizer. `can_split`: segments of `TextSplitter` have the same ids as the whole text.

    `token_bytes[id]` are the exact bytes of a token. None: only `decode` returns its text.
    `special_ids` are the ids of tokens that represent no text.
    """

    def __init__(self, encoder: Encoder, file: TokenizerFile, cuts_verified: bool = False) -> None:
        self._encoder = encoder
        self.added_tokens: tuple[AddedToken, ...] = file.added_tokens
        self.special_ids = special_ids(file)
        self.token_bytes: list[bytes | None] = token_bytes_table(file)
        self.can_split = cuts_verified and can_split_text(file)
        self._max_composed_chars = MAX_COMPOSED_CHARS if file.normalizer else 1

    @property
    def encoder_name(self) -> str:
        """The name of the library that encodes."""
        return self._encoder.name

    @property
    def vocab_size(self) -> int:
        """The highest id plus one."""
        return len(self.token_bytes)

    def max_chars_of(self, tokens: int) -> float:
        """Return the most characters that `tokens` tokens can represent; infinity if unknown."""
        if not self.can_split:
            return inf
        return tokens * self._max_composed_chars * max(len(raw) for raw in self.token_bytes if raw)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> bytes:
        """Return packed u32 ids. `add_special`: with the tokens that the tokenizer adds (BOS).

        `parse_special`: special tokens in the text are encoded as such. Raises `InvalidRequest`.
        """
        ids = self._encoder.encode(text, parse_special)
        if not add_special:
            return ids
        before, after = self.prompt_affixes
        return before + ids + after

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return self._encoder.decode(ids, skip_special)

    def encode_behind_text(self, text: str, *, parse_special: bool = True) -> bytes:
        """Return packed ids of a text that continues another one: without the space that
        SentencePiece puts before a text."""
        if not self.has_exact_bytes:
            for before in _TEXTS_BEFORE:
                start = self.encode(before)
                whole = self.encode(before + text, parse_special=parse_special)
                if whole.startswith(start):
                    return whole[len(start) :]
        return self.encode(text, parse_special=parse_special)

    def decode_behind_text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` that continue another text, with the space that decoders drop at
        a beginning."""
        before = unpack_ids(self.encode("a"))
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's string for an id, in the tokenizer's alphabet."""
        return self._encoder.id_to_token(token_id)

    def stream_decoder(
        self, *, skip_special: bool = True, prompt_end: Sequence[int] = ()
    ) -> StreamDecoder:
        """Return an incremental decoder of text behind `prompt_end`, for tokenizers without exact
        token bytes."""
        return StreamDecoder(self, skip_special, prompt_end)

    @cached_property
    def has_exact_bytes(self) -> bool:
        """Whether `token_bytes` are known."""
        return any(raw is not None for raw in self.token_bytes)

    @cached_property
    def token_texts(self) -> list[str | None]:
        """The text of each id. None: the id is not whole UTF-8 without its neighbours."""
        return [_decode_utf8(raw) for raw in self.token_bytes]

    @cached_property
    def text_token_ids(self) -> list[int]:
        """Ids that alone decode to whole, non-empty text and are not special."""
        if self.has_exact_bytes:
            return _text_token_ids(self.token_bytes, self.special_ids)
        texts = (self._decode_alone(number) for number in range(self.vocab_size))
        return [n for n, text in enumerate(texts) if text and n not in self.special_ids]

    @cached_property
    def prompt_affixes(self) -> tuple[bytes, bytes]:
        """The packed ids that the tokenizer adds before (BOS) and after a prompt."""
        whole, bare = self._encoder.encode_with_special_tokens("a"), self._encoder.encode("a")
        start = whole.find(bare)
        if start < 0:
            raise ModelUnavailable("the tokenizer changes a text when it adds special tokens")
        return whole[:start], whole[start + len(bare) :]

    def _decode_alone(self, token_id: int) -> str | None:
        text = self.decode([token_id])
        return None if _REPLACEMENT in text else text


class StreamDecoder:
    """Decodes ids one by one, behind the end of a prompt. Incomplete characters are held back, also
    one that the prompt begins."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, prompt_end: Sequence[int] = ()
    ) -> None:
        self._decode = tokenizer.decode
        self._skip_special = skip_special
        self._ids, self._emitted = self._choose_context(prompt_end)

    def _choose_context(self, prompt_end: Sequence[int]) -> tuple[list[int], int]:
        """Return ids that precede the answer, and how many of them are whole text."""
        known = len(prompt_end)
        for whole in range(known, max(0, known - 1 - _MAX_CUT_TOKENS), -1):
            for start in range(max(0, whole - _CONTEXT_TOKENS), -1, -1):
                text = self._decode_ids(prompt_end[start:whole])
                if text and _REPLACEMENT not in text:
                    return list(prompt_end[start:]), whole - start
        return list(prompt_end), known

    def step(self, token_id: int) -> str:
        """Return the text that `token_id` completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        before = self._decode_ids(self._ids[: self._emitted])
        now = self._decode_ids(self._ids)
        endless = len(self._ids) - self._emitted >= MAX_INCOMPLETE_TOKENS
        if len(now) <= len(before):
            if endless:
                del self._ids[self._emitted :]
            return ""
        if now.endswith(_REPLACEMENT) and not endless:
            return ""
        self._ids = self._ids[self._emitted :]  # decoding needs the last emitted ids
        self._emitted = len(self._ids)
        return now[len(before) :]

    @property
    def pending_ids(self) -> Sequence[int]:
        """The ids whose text is held back."""
        return self._ids[self._emitted :]

    def flush(self) -> str:
        """Return the text that is still held back. An incomplete character becomes U+FFFD."""
        before = self._decode_ids(self._ids[: self._emitted])
        now = self._decode_ids(self._ids)
        self._emitted = len(self._ids)
        return now[len(before) :]

    def _decode_ids(self, ids: Sequence[int]) -> str:
        return self._decode(ids, skip_special=self._skip_special)


_loaded = WeakValueDictionary[tuple[str, EncoderVerification | None], Tokenizer]()
"""Tokenizers in use, by the digest of their file."""
_load_lock = Lock()


def load_tokenizer(source: FileRef | Path, *, ensure_verified: bool = False) -> Tokenizer:
    """Return a tokenizer, the same one for equal files while it is in use: it takes 30 MB. Blocks.
    Raises `ModelUnavailable`.

    `ensure_verified`: verify the fast encoder if that was not done (seconds, once).
    """
    ref = file_ref(source) if isinstance(source, Path) else source
    path = find_file(ref)
    if path is None:
        raise ModelUnavailable(
            f"the tokenizer {ref.name} is not on this host", hint="fetch it from a worker first"
        )
    verification = verify_encoder(ref) if ensure_verified else cached_verification(ref)
    with _load_lock:
        tokenizer = _loaded.get((ref.sha256, verification))
        if tokenizer is None:
            cuts_verified = verification is not None and verification.cuts
            file = read_tokenizer_file(path)  # its errors name the file
            tokenizer = Tokenizer(fastest_encoder(path, verification), file, cuts_verified)
            _loaded[ref.sha256, verification] = tokenizer
            trim_heap()
        return tokenizer


def read_text_token_ids(source: FileRef | Path) -> list[int]:
    """Return `Tokenizer.text_token_ids`, without an encoder if token bytes are exact. Blocks."""
    path = source if isinstance(source, Path) else find_file(source)
    if path is None:
        raise ModelUnavailable("the tokenizer is not on this host")
    file = read_tokenizer_file(path)
    table = token_bytes_table(file)
    if any(raw is not None for raw in table):
        return _text_token_ids(table, special_ids(file))
    return load_tokenizer(source).text_token_ids


def trim_heap() -> None:
    """Return free heap to the system: parsing a vocabulary leaves about 30 MB behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _text_token_ids(table: list[bytes | None], special: frozenset[int]) -> list[int]:
    return [n for n, raw in enumerate(table) if raw and _decode_utf8(raw) and n not in special]


def _decode_utf8(raw: bytes | None) -> str | None:
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
