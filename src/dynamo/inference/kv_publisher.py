"""KVPublisher: tells routers which KV blocks one worker, or one data-parallel rank of it, holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Self

from dynamo.communication.events import Events, EventSource
from dynamo.core.kv_events import KV_EVENTS_SUBJECT, encode_kv_event_payloads, worker_name
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier
from dynamo.telemetry import Registry

KV_STORED: Final = "kv_stored"
KV_REMOVED: Final = "kv_removed"

DumpKvState = Callable[[], Sequence[KvEvent]]
"""Changes that rebuild the present state from nothing, parents first."""


class KVPublisher:
    """Make it by `open`. Everything of one worker or rank goes out in order as `kv_events`, one
    payload a step, numbered by the plane; who joins late or missed too much gets `held()`.

    `apart`: besides, stored and removed blocks go out as subjects of their own, for listeners that
    want one kind only; between the two there is no order.
    """

    def __init__(self, dump_state: DumpKvState, totals: Counter[str] | None = None) -> None:
        """`published`: where totals are counted."""
        self._dump_state = dump_state
        self._sources: dict[str, EventSource] = {}
        self.totals: Counter[str] = Counter() if totals is None else totals

    @classmethod
    async def open(
        cls,
        events: Events,
        component: str,
        instance: str,
        dump_state: DumpKvState,
        *,
        rank: int | None = None,
        separate_subjects: bool = False,
        totals: Counter[str] | None = None,
    ) -> Self:
        """Publish under `component` ("namespace.component") as `instance`, of which `rank` is
        one data-parallel rank."""
        made = cls(dump_state, totals)
        worker = worker_name(instance, rank)
        subject = f"{component}.{KV_EVENTS_SUBJECT}"
        made._sources[KV_EVENTS_SUBJECT] = await events.open_source(
            subject, worker, made._encode_dump
        )
        if separate_subjects:
            for kind in (KV_STORED, KV_REMOVED):
                made._sources[kind] = await events.open_source(f"{component}.{kind}", worker)
        return made

    def publish(self, changes: Sequence[KvEvent]) -> None:
        """What changed in a step, in order. Never blocks, never drops."""
        published = self.totals
        for change in changes:
            if isinstance(change, BlocksStored):
                published["stored"] += len(change.hashes)
            elif isinstance(change, BlocksRemoved):
                published["removed"] += len(change.hashes)
            else:
                published["cleared"] += 1
        published["events"] += 1
        self._send(KV_EVENTS_SUBJECT, changes)
        if len(self._sources) > 1:
            self._send(KV_STORED, [one for one in changes if isinstance(one, BlocksStored)])
            self._send(KV_REMOVED, [one for one in changes if not isinstance(one, BlocksStored)])

    def publish_stored(self, parent: int, hashes: Sequence[int], tier: Tier = "device") -> None:
        """These blocks are held now; a chain whose first hangs under `parent` (0: the root)."""
        self.publish((BlocksStored(parent, tuple(hashes), tier),))

    def publish_removed(self, hashes: Sequence[int], tier: Tier = "device") -> None:
        """These blocks are not held any more."""
        self.publish((BlocksRemoved(tuple(hashes), tier),))

    def publish_cleared(self) -> None:
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
        for payload in encode_kv_event_payloads(changes):
            source.publish(payload)

    def _encode_dump(self) -> Sequence[bytes]:
        self.totals["dumps"] += 1
        return encode_kv_event_payloads(self._dump_state())


def declare_kv_publisher_metrics(registry: Registry, totals: Counter[str]) -> None:
    """Totals of what was published."""
    registry.counter(
        "dynamo_worker_kv_events_total",
        "Batches of KV events published; every change of the prefix cache is in one.",
        callback=lambda: totals["events"],
    )
    registry.counter(
        "dynamo_worker_kv_blocks_total",
        "KV blocks told of, by what became of them.",
        ("change",),
        callback=lambda: {(kind,): totals[kind] for kind in ("stored", "removed")},
    )
    registry.counter(
        "dynamo_worker_kv_dumps_total",
        "Whole states sent, to listeners that joined late or missed too much.",
        callback=lambda: totals["dumps"],
    )
