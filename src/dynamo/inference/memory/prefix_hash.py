"""Names of prefixes, 16 hexadecimal characters each."""

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
    """SHA-256 over the first `prefix_length` tokens, each as decimal digits, or over the first
    `prefix_bytes` bytes of what has none. `tokenize` makes tokens of texts.

    A `key` makes it HMAC-SHA-256: who does not know the key can neither guess names nor make two
    prefixes share one. Without it equal digits are equal names: tokens (1, 23) are (12, 3).
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
            raise ConfigError("a prefix has at least one token, or one byte")
        self.prefix_length = prefix_length
        self.prefix_bytes = prefix_bytes
        self._key = key
        self._tokenize = tokenize

    def __call__(self, content: PrefixContent) -> str:
        """The name of the prefix of `content`. Raises `ConfigError` for a text that nothing can
        tokenize."""
        prefix = self._encode_prefix(content)
        if self._key:
            whole = hmac.digest(self._key, prefix, "sha256").hex()
        else:
            whole = hashlib.sha256(prefix).hexdigest()
        return whole[:HASH_CHARACTERS]

    def _encode_prefix(self, content: PrefixContent) -> bytes:
        if isinstance(content, bytes):
            return content[: self.prefix_bytes]
        if isinstance(content, str):
            if self._tokenize is None:
                raise ConfigError("a text has no tokens without `tokenize`", hint="give token ids")
            content = self._tokenize(content)
        between = b"," if self._key else b""
        return between.join(b"%d" % token for token in content[: self.prefix_length])


def chained_hash(block_tokens: int, parent: int = 0) -> Callable[[PrefixContent], str]:
    """The library's own name of a block's whole prefix, as KV events bear it, instead: of the last
    full block of the token ids. `parent`: the hash of the block, or of the salt, above them."""

    def name(content: PrefixContent) -> str:
        if isinstance(content, str):
            raise ConfigError("block hashes are of tokens", hint="give token ids")
        packed = content if isinstance(content, bytes) else pack_ids(content)
        hashes = block_hashes(packed, block_tokens, parent)
        return f"{hashes[-1] if hashes else parent:0{HASH_CHARACTERS}x}"

    return name
