"""What a router believes of every worker's cache: what events say, and what it has sent there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from dynamo.communication.events import Event, Events
from dynamo.core.clock import Clock
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent
from dynamo.scheduling.index.kv_index import DEFAULT_BUDGET_BYTES, KvIndex

Mode = Literal["exact", "stale", "approximate"]
"""exact: the worker's events are complete. stale: a gap is being repaired. approximate: it sends no
events, so that only predictions tell."""

DEFAULT_TTL_S: Final = 120.0


class CacheView:
    """Overlaps of a prompt with every worker's cache.

    A worker is named "instance", or "instance/rank" where it has data-parallel ranks. `ttl_s`: how
    long a prediction is believed of a worker that sends no events.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        block_tokens: int = 16,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> None:
        self._clock = clock
        self.block_tokens = block_tokens
        self._ttl_s = ttl_s
        self.index = KvIndex(budget_bytes)
        self._modes: dict[str, Mode] = {}

    async def follow(self, events: Events, subject_prefix: str) -> None:
        """Hear every `kv_events` source under the prefix, until `close`."""
        del events, subject_prefix

    def close(self) -> None:
        """Hear no more."""

    def apply(self, worker: str, changes: Sequence[KvEvent]) -> None:
        """What a worker says of its cache. From now on it is known exactly."""
        index = self.index
        self._modes[worker] = "exact"
        for change in changes:
            if isinstance(change, BlocksStored):
                index.store(worker, change.parent, change.hashes)
            elif isinstance(change, BlocksRemoved):
                index.remove(worker, change.hashes)
            else:
                index.clear(worker)

    def drop(self, worker: str) -> None:
        """The worker is no more."""
        self.index.drop(worker)
        self._modes.pop(worker, None)

    def overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix of `hashes` that it holds, or will hold by what
        was routed there (> 0 only)."""
        return self.index.match(hashes)

    def routed(self, worker: str, hashes: Sequence[int]) -> None:
        """A prompt was sent to the worker: it will hold these blocks."""

    def settled(self, worker: str, hashes: Sequence[int]) -> None:
        """The first token of a routed prompt came, or it failed: its blocks are now for events to
        tell."""

    def mode(self, worker: str) -> Mode:
        """How far the view of this worker can be trusted."""
        return self._modes.get(worker, "approximate")

    def _hear(self, event: Event) -> None:
        raise NotImplementedError
