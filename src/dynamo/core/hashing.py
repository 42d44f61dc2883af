"""Block identity: chained xxh3-64 over (parent, token ids), rooted in a salt.

The same tokens after the same prefix under the same salt have the same hash on every worker, so a
hash names content. Source: vLLM's automatic prefix caching, SGLang's radix tree; the chain makes a
flat map enough.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import iter_unpack

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 16
TOKEN_BYTES = 4
HASH_SCHEME = "xxh3-64 chained over u32 tokens, salt as root"
"""Names the scheme: workers and routers that differ in it cannot understand each other."""


def root_hash(salt: str = "") -> int:
    """The parent of every first block of a tenant, adapter or media salt; 0 without a salt."""
    return xxh3_64_intdigest(salt.encode()) if salt else 0


def block_hashes(token_ids: bytes, block_tokens: int = BLOCK_TOKENS, parent: int = 0) -> list[int]:
    """Hashes of the full blocks of packed u32 `token_ids`, in order; a partial tail has none."""
    size = block_tokens * TOKEN_BYTES
    blocks = iter_unpack(f"{size}s", token_ids[: len(token_ids) // size * size])
    return [parent := xxh3_64_intdigest(block, parent) for (block,) in blocks]


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Little-endian u64, as all machines that this runs on have them in memory."""
    return array("Q", hashes).tobytes()


def unpack_hashes(packed: bytes) -> list[int]:
    """What `pack_hashes` packed. Raises ValueError."""
    hashes = array("Q")
    hashes.frombytes(packed)
    return hashes.tolist()
