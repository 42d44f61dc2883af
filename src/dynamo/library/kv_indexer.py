"""KVIndexer: the library interface to the KV index, for user programs."""

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
    """Which workers of a component hold which blocks. Use it as an async context manager, or call
    `start` and `close`. `block_size`, in tokens, must be that of the workers."""

    def __init__(self, component: Component, block_size: int = BLOCK_TOKENS) -> None:
        self._runtime = component.namespace.runtime
        self._events_subject = f"{component.namespace.name}.{component.name}.{KV_EVENTS_SUBJECT}"
        self.block_size = block_size
        self.view = CacheView(self._runtime.clock, block_tokens=block_size)

    async def start(self) -> None:
        """Subscribe to the KV events of all present and future workers of the component."""
        await self.view.subscribe(self._runtime.events, self._events_subject)

    def close(self) -> None:
        """Unsubscribe from the KV events."""
        self.view.close()

    def update_index(self, event: Event) -> None:
        """Apply a `kv_events` event. Events of the subscription are applied automatically."""
        self.view.on_event(event)

    def find_matches(self, token_ids: Sequence[int], salt: str = "") -> dict[str, int]:
        """Return worker -> tokens of the longest held prefix, in full blocks (> 0 only)."""
        hashes = block_hashes(pack_ids(token_ids), self.block_size, root_hash(salt))
        held = self.find_matches_for_hashes(hashes)
        return {worker: blocks * self.block_size for worker, blocks in held.items()}

    def find_matches_for_hashes(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return worker -> blocks of the longest held prefix (> 0 only)."""
        return self.view.find_overlaps(hashes)

    def workers(self) -> Mapping[str, CacheViewMode]:
        """Return worker -> mode of its cache view."""
        return self.view.get_modes()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
