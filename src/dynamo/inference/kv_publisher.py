"""KVPublisher: tells routers which KV blocks one worker, or one data-parallel rank of it, holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Self

from dynamo.communication.events import Events, Source
from dynamo.core.kv_events import KV_EVENTS, event_payloads, worker_name
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier
from dynamo.telemetry import Registry

KV_STORED: Final = "kv_stored"
KV_REMOVED: Final = "kv_removed"

Held = Callable[[], Sequence[KvEvent]]
"""Changes that rebuild the present state from nothing, parents first."""


class KVPublisher:
    """Make it by `open`. Everything of one worker or rank goes out in order as `kv_events`, one
    payload a step, numbered by the plane; who joins late or missed too much gets `held()`.

    `apart`: besides, stored and removed blocks go out as subjects of their own, for listeners that
    want one kind only; between the two there is no order.
    """

    def __init__(self, held: Held, published: Counter[str] | None = None) -> None:
        """`published`: where totals are counted."""
        self._held = held
        self._sources: dict[str, Source] = {}
        self.published: Counter[str] = Counter() if published is None else published

    @classmethod
    async def open(
        cls,
        events: Events,
        component: str,
        instance: str,
        held: Held,
        *,
        rank: int | None = None,
        apart: bool = False,
        published: Counter[str] | None = None,
    ) -> Self:
        """Publish under `component` ("namespace.component") as `instance`, of which `rank` is
        one data-parallel rank."""
        made = cls(held, published)
        worker = worker_name(instance, rank)
        subject = f"{component}.{KV_EVENTS}"
        made._sources[KV_EVENTS] = await events.source(subject, worker, made._dump)
        if apart:
            for kind in (KV_STORED, KV_REMOVED):
                made._sources[kind] = await events.source(f"{component}.{kind}", worker)
        return made

    def publish(self, changes: Sequence[KvEvent]) -> None:
        """What changed in a step, in order. Never blocks, never drops."""
        published = self.published
        for change in changes:
            if isinstance(change, BlocksStored):
                published["stored"] += len(change.hashes)
            elif isinstance(change, BlocksRemoved):
                published["removed"] += len(change.hashes)
            else:
                published["cleared"] += 1
        published["events"] += 1
        self._send(KV_EVENTS, changes)
        if len(self._sources) > 1:
            self._send(KV_STORED, [one for one in changes if isinstance(one, BlocksStored)])
            self._send(KV_REMOVED, [one for one in changes if not isinstance(one, BlocksStored)])

    def stored(self, parent: int, hashes: Sequence[int], tier: Tier = "device") -> None:
        """These blocks are held now; a chain whose first hangs under `parent` (0: the root)."""
        self.publish((BlocksStored(parent, tuple(hashes), tier),))

    def removed(self, hashes: Sequence[int], tier: Tier = "device") -> None:
        """These blocks are not held any more."""
        self.publish((BlocksRemoved(tuple(hashes), tier),))

    def cleared(self) -> None:
        """Nothing is held any more."""
        self.publish((BlocksCleared(),))

    async def close(self) -> None:
        """Indexes forget this worker."""
        for source in self._sources.values():
            await source.close()

    def _send(self, kind: str, changes: Sequence[KvEvent]) -> None:
        if not changes:
            return
        source = self._sources[kind]
        for payload in event_payloads(changes):
            source.publish(payload)

    def _dump(self) -> Sequence[bytes]:
        self.published["dumps"] += 1
        return event_payloads(self._held())


def declare_publisher(registry: Registry, published: Counter[str]) -> None:
    """Totals of what was published."""
    registry.counter(
        "dynamo_worker_kv_events_total",
        "Batches of KV events published; every change of the prefix cache is in one.",
        callback=lambda: published["events"],
    )
    registry.counter(
        "dynamo_worker_kv_blocks_total",
        "KV blocks told of, by what became of them.",
        ("change",),
        callback=lambda: {(kind,): published[kind] for kind in ("stored", "removed")},
    )
    registry.counter(
        "dynamo_worker_kv_dumps_total",
        "Whole states sent, to listeners that joined late or missed too much.",
        callback=lambda: published["dumps"],
    )
