"""Digests that stand for the KV of mock blocks, so that a wrong block is noticed on arrival."""

from __future__ import annotations

from struct import Struct

from xxhash import xxh3_64_digest

from dynamo.inference.sequence import EngineSequence, TokenContent

DIGEST_BYTES = 8
SLOT_BYTES = 64
"""Memory of a block that peers read: a whole cache line."""
_pack = Struct("<Q").pack


def block_digest(sequence: EngineSequence, index: int, block_tokens: int) -> bytes:
    """Return the digest of block `index` of a prompt: of all tokens up to its end and of the salt.
    A block that the prompt does not fill has a digest of the tokens that are in it."""
    content, start = sequence.content, index * block_tokens
    if start + block_tokens <= sequence.prompt_tokens:
        content.ensure_hashes(index + 1)
        return _pack(content.hashes[index])
    content.ensure_hashes(index)
    parent = content.hashes[index - 1] if index else content.root
    tail = b""
    if isinstance(content, TokenContent):
        tail = content.tokens[start : sequence.prompt_tokens].tobytes()
    return xxh3_64_digest(_pack(parent) + tail)
