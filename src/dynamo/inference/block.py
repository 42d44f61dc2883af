"""One block of KV memory."""

from __future__ import annotations


class Block:
    """One block. `hash` and `parent` mean something only while `held`; `hits` counts the sequences
    that found it; `used` is the eviction policy's own."""

    __slots__ = ("hash", "held", "hits", "id", "parent", "refs", "used")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.held = False
        self.hash = 0
        self.parent = 0
        self.hits = 0
        self.used = 0
