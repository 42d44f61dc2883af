"""Hashes of KV blocks: chained xxh3-64 over (parent hash, token ids), rooted in a salt.

The same tokens after the same prefix under the same salt have the same hash on every worker. A hash
therefore names content, as in vLLM's automatic prefix caching. Because of the chain a flat map
replaces SGLang's radix tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256
from struct import iter_unpack

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 16
TOKEN_BYTES = 4
IDENTITY_BYTES = 16
HASH_SCHEME = "xxh3-64 chained over u32 tokens, salt as root"
"""Name of the scheme. Workers and routers must use the same one."""


def root_hash(salt: str = "") -> int:
    """Return the parent hash of first blocks under a tenant, adapter or media salt; 0 for ""."""
    return xxh3_64_intdigest(salt.encode()) if salt else 0


def adapter_salt(adapter: str, salt: str) -> str:
    """Return the salt of a request that names a LoRA adapter by its id, whose own salt is `salt`.
    Blocks of different adapters are never shared."""
    digest = blake2b(f"{adapter}\0{salt}".encode(), digest_size=IDENTITY_BYTES)
    return f"adapter {digest.hexdigest()}"


def block_hashes(token_ids: bytes, block_tokens: int = BLOCK_TOKENS, parent: int = 0) -> list[int]:
    """Return the hashes of the full blocks of packed u32 `token_ids`. A partial tail has none."""
    size = block_tokens * TOKEN_BYTES
    blocks = iter_unpack(f"{size}s", token_ids[: len(token_ids) // size * size])
    return [parent := xxh3_64_intdigest(block, parent) for (block,) in blocks]


def root_identity(salt: str = "") -> bytes:
    """Return the identity above the first blocks under a salt."""
    return sha256(b"salt " + salt.encode()).digest()[:IDENTITY_BYTES]


def prefix_identities(token_ids: bytes, block_tokens: int, parent: bytes) -> list[bytes]:
    """Return 16 bytes for each full block of packed u32 `token_ids`: a chained SHA-256, which
    clients cannot forge. `parent` is the identity of the block before, or `root_identity`. All
    processes compute the same, so that blocks on a disk or in a shared store can be compared."""
    size = block_tokens * TOKEN_BYTES
    blocks = iter_unpack(f"{size}s", token_ids[: len(token_ids) // size * size])
    return [parent := sha256(parent + block).digest()[:IDENTITY_BYTES] for (block,) in blocks]


def checksum(data: bytes | memoryview) -> int:
    """Return the xxh3-64 of the content of a block, for copies over a network."""
    return xxh3_64_intdigest(data)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Pack hashes as native u64, which is little-endian on all supported machines."""
    return array("Q", hashes).tobytes()


def unpack_hashes(packed: bytes) -> list[int]:
    """Unpack the result of `pack_hashes`. Raises `ValueError`."""
    hashes = array("Q")
    hashes.frombytes(packed)
    return hashes.tolist()
