"""Prefix names of 16 hexadecimal characters."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.core.codec import pack_ids
from dynamo.core.errors import ConfigError
from dynamo.core.hashing import block_hashes

PrefixContent = str | bytes | Sequence[int]
"""A text, bytes, or token ids."""

HASH_CHARACTERS: Final = 16


class PrefixHash:
    """Names a prefix by SHA-256 over its first tokens or bytes.

    Of token ids and texts the first `prefix_length` tokens count, written as decimal digits. Of
    bytes the first `prefix_bytes` count. `tokenize` turns texts into tokens.

    With a `key` the hash is HMAC-SHA-256: without the key names cannot be guessed, and two prefixes
    cannot be made to collide. Without a key equal digits have equal names: (1, 23) and (12, 3).
    """

    def __init__(
        self,
        prefix_length: int = 256,
        prefix_bytes: int = 1024,
        *,
        key: bytes = b"",
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        if prefix_length < 1 or prefix_bytes < 1:
            raise ConfigError("prefix_length and prefix_bytes must be at least 1")
        self.prefix_length = prefix_length
        self.prefix_bytes = prefix_bytes
        self._key = key
        self._tokenize = tokenize

    def __call__(self, content: PrefixContent) -> str:
        """Return the name of the prefix of `content`. Raises `ConfigError` for a text if there is
        no `tokenize`."""
        prefix = self._encode_prefix(content)
        if self._key:
            digest = hmac.digest(self._key, prefix, "sha256").hex()
        else:
            digest = hashlib.sha256(prefix).hexdigest()
        return digest[:HASH_CHARACTERS]

    def _encode_prefix(self, content: PrefixContent) -> bytes:
        if isinstance(content, bytes):
            return content[: self.prefix_bytes]
        if isinstance(content, str):
            if self._tokenize is None:
                raise ConfigError("a text needs `tokenize`", hint="pass token ids instead")
            content = self._tokenize(content)
        separator = b"," if self._key else b""
        return separator.join(b"%d" % token for token in content[: self.prefix_length])


def chained_hash(block_tokens: int, parent: int = 0) -> Callable[[PrefixContent], str]:
    """Return a function that names the last full block of token ids by its chained hash. The name
    is the block hash that KV events contain. `parent` is the hash above the first block. Use it in
    place of `PrefixHash`."""

    def name(content: PrefixContent) -> str:
        if isinstance(content, str):
            raise ConfigError("block hashes need tokens, not a text", hint="pass token ids instead")
        packed = content if isinstance(content, bytes) else pack_ids(content)
        hashes = block_hashes(packed, block_tokens, parent)
        return f"{hashes[-1] if hashes else parent:0{HASH_CHARACTERS}x}"

    return name
