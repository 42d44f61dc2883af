"""One block of KV memory."""

from __future__ import annotations


class Block:
    """One block. `hash` and `parent` mean something only while `held`; `hits` counts the sequences
    that found it; `used` is the eviction policy's own."""

    __slots__ = ("block_hash", "cached", "hits", "id", "last_used", "parent_hash", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.cached = False
        self.block_hash = 0
        self.parent_hash = 0
        self.hits = 0
        self.last_used = 0
