"""A block: the unit in which KV memory is allocated and shared."""

from __future__ import annotations

from typing import Any


class Block:
    """A fixed number of token positions in KV memory. `cached` blocks are registered in the prefix
    cache; only then `block_hash` and `parent_hash` are valid. `hits` counts the sequences that
    reused the block. `run` belongs to the eviction policy. `fingerprint` is the keyed hash of
    its tokens: clients can find other tokens with the same `block_hash`."""

    __slots__ = (
        "block_hash",
        "cached",
        "fingerprint",
        "hits",
        "id",
        "parent_hash",
        "ref_count",
        "run",
    )

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.cached = False
        self.block_hash = 0
        self.fingerprint = 0
        self.parent_hash = 0
        self.hits = 0
        self.run: Any = None
