"""KVIndexer: which workers of a component hold which blocks, for programs of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from dynamo.communication.events import Event
from dynamo.core.codec import pack_ids
from dynamo.core.hashing import BLOCK_TOKENS, block_hashes, root_hash
from dynamo.core.kv_events import KV_EVENTS_SUBJECT
from dynamo.runtime.component import Component
from dynamo.scheduling.index.cache_view import CacheView, CacheViewMode


class KVIndexer:
    """`async with KVIndexer(component) as indexer`, or `start` and `close`. `block_size`: tokens in
    one block, as the workers have it."""

    def __init__(self, component: Component, block_size: int = BLOCK_TOKENS) -> None:
        self._runtime = component.namespace.runtime
        self._events_subject = f"{component.namespace.name}.{component.name}.{KV_EVENTS_SUBJECT}"
        self.block_size = block_size
        self.view = CacheView(self._runtime.clock, block_tokens=block_size)

    async def start(self) -> None:
        """Hear the KV events of every worker of the component, present and future."""
        await self.view.subscribe(self._runtime.events, self._events_subject)

    def close(self) -> None:
        """Hear no more."""
        self.view.close()

    def update_index(self, event: Event) -> None:
        """One `kv_events` event; what `start` hears comes here by itself."""
        self.view.on_event(event)

    def find_matches(self, token_ids: Sequence[int], salt: str = "") -> dict[str, int]:
        """worker -> tokens of the longest prefix that it holds, in full blocks (> 0 only)."""
        hashes = block_hashes(pack_ids(token_ids), self.block_size, root_hash(salt))
        held = self.find_matches_for_hashes(hashes)
        return {worker: blocks * self.block_size for worker, blocks in held.items()}

    def find_matches_for_hashes(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix that it holds (> 0 only)."""
        return self.view.find_overlaps(hashes)

    def workers(self) -> Mapping[str, CacheViewMode]:
        """How far the view of each worker can be trusted."""
        return self.view.get_modes()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
