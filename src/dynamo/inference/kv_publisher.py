"""`KVPublisher` reports the KV blocks of one worker, or of one of its data-parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Self

from dynamo.communication.events import Events, EventSource
from dynamo.core.kv_events import (
    KV_EVENTS_SUBJECT,
    encode_kv_event_payloads,
    model_subject,
    worker_name,
)
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent, Tier
from dynamo.telemetry import Registry

KV_STORED: Final = "kv_stored"
KV_REMOVED: Final = "kv_removed"

DumpKvState = Callable[[], Sequence[KvEvent]]
"""Returns events that rebuild the present state from an empty one, parents first."""


class KVPublisher:
    """Publishes KV events of a worker or rank. Create it with `open`.

    All events go out in order on the subject `kv_events`, as one payload a step, numbered by the
    event plane. A listener that joins late or missed events gets a dump of the state instead.

    With `separate_subjects` stored and removed blocks are also published on subjects of their own.
    The order between two subjects is not defined.
    """

    def __init__(self, dump_state: DumpKvState, totals: Counter[str] | None = None) -> None:
        """`totals`: a counter that several publishers may share."""
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
        model: str = "",
        rank: int | None = None,
        separate_subjects: bool = False,
        totals: Counter[str] | None = None,
    ) -> Self:
        """Open a publisher under `component`, which is "namespace.component", of a worker of
        `model`. `rank`: the data-parallel rank of `instance` that it reports on, if there are
        several."""
        publisher = cls(dump_state, totals)
        worker = worker_name(instance, rank)
        subject = model_subject(component, KV_EVENTS_SUBJECT, model)
        publisher._sources[KV_EVENTS_SUBJECT] = await events.open_source(
            subject, worker, publisher._encode_dump
        )
        if separate_subjects:
            for kind in (KV_STORED, KV_REMOVED):
                publisher._sources[kind] = await events.open_source(f"{component}.{kind}", worker)
        return publisher

    def publish(self, changes: Sequence[KvEvent]) -> None:
        """Publish the changes of one step, in order. Never blocks and never drops an event."""
        totals = self.totals
        for change in changes:
            if isinstance(change, BlocksStored):
                totals["stored"] += len(change.hashes)
            elif isinstance(change, BlocksRemoved):
                totals["removed"] += len(change.hashes)
            else:
                totals["cleared"] += 1
        totals["events"] += 1
        self._send(KV_EVENTS_SUBJECT, changes)
        if len(self._sources) > 1:
            self._send(
                KV_STORED, [change for change in changes if isinstance(change, BlocksStored)]
            )
            self._send(
                KV_REMOVED, [change for change in changes if not isinstance(change, BlocksStored)]
            )

    def publish_stored(self, parent: int, hashes: Sequence[int], tier: Tier = "device") -> None:
        """Report a chain of stored blocks. `parent` is the hash above the first one, 0 for the
        root."""
        self.publish((BlocksStored(parent, tuple(hashes), tier),))

    def publish_removed(self, hashes: Sequence[int], tier: Tier = "device") -> None:
        """Report blocks that are not held any more."""
        self.publish((BlocksRemoved(tuple(hashes), tier),))

    async def close(self) -> None:
        """Close the event sources. Indexes then drop this worker."""
        for source in self._sources.values():
            await source.close()

    def _send(self, kind: str, changes: Sequence[KvEvent]) -> None:
        if not changes:
            return
        for payload in encode_kv_event_payloads(changes):
            self._sources[kind].publish(payload)

    def _encode_dump(self) -> Sequence[bytes]:
        self.totals["dumps"] += 1
        return encode_kv_event_payloads(self._dump_state())


def declare_kv_publisher_metrics(registry: Registry, totals: Counter[str]) -> None:
    """Declare counters of the published events."""
    registry.counter(
        "dynamo_worker_kv_events_total",
        "Batches of KV events published; every change of the prefix cache is in one.",
        callback=lambda: totals["events"],
    )
    registry.counter(
        "dynamo_worker_kv_blocks_total",
        "KV blocks in published events, by change.",
        ("change",),
        callback=lambda: {(kind,): totals[kind] for kind in ("stored", "removed")},
    )
    registry.counter(
        "dynamo_worker_kv_dumps_total",
        "Dumps of the whole cache state, sent to listeners that joined late or missed events.",
        callback=lambda: totals["dumps"],
    )
