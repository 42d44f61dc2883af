"""Events of a graph: what the operator did and why, counted instead of repeated."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

import msgspec

from dynamo.communication.kubernetes.link import MERGE_PATCH, KubernetesLink
from dynamo.core.clock import Clock
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.operator.kinds import GraphStatus
from dynamo.operations.operator.names import OPERATOR
from dynamo.operations.operator.status import time_text

log = logging.getLogger(__name__)
KNOWN_EVENTS = 1000
WARNINGS = frozenset(
    {"Invalid", "ReferenceMissing", "RolloutStuck", "TwoManagers", "insufficient_capacity"}
)


class KnownEvent(msgspec.Struct):
    """An event that was written, and how often it has happened."""

    name: str
    first: str
    count: int = 0


class EventRecorder:
    """Writes events in the background. Texts of one reconciliation under one reason are one."""

    def __init__(self, link: KubernetesLink, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._pending: dict[tuple[str, str], tuple[Any, list[str]]] = {}
        self._known: dict[tuple[str, str, str], KnownEvent] = {}

    def add(self, graph: Any, reason: str, text: str) -> None:
        """Note an event."""
        key = (graph["metadata"]["uid"], reason)
        self._pending.setdefault(key, (graph, []))[1].append(text)

    def add_status(self, graph: Any, status: GraphStatus) -> None:
        """Note conditions that are different from those that the graph had."""
        before = {
            row["type"]: (row["status"], row.get("reason", ""))
            for row in (graph.get("status") or {}).get("conditions") or ()
        }
        for row in status.conditions:
            if before.get(row.type) != (row.status, row.reason):
                self.add(graph, row.reason or row.type, row.message or f"{row.type} {row.status}")

    def flush(self, tasks: BackgroundTasks) -> None:
        """Write the noted events."""
        pending, self._pending = self._pending, {}
        for (uid, reason), (graph, texts) in pending.items():
            message = ", ".join(texts)[:1000]
            known = self._known.pop((uid, reason, message), None)
            now = time_text(self._clock.wall())
            if known is None:
                known = KnownEvent(f"{graph['metadata']['name']}.{uuid4().hex[:16]}", now)
            known.count += 1
            self._known[uid, reason, message] = known
            if len(self._known) > KNOWN_EVENTS:
                del self._known[next(iter(self._known))]
            tasks.start(self._write(graph, reason, message, known, now), "kubernetes event")

    async def _write(
        self, graph: Any, reason: str, message: str, known: KnownEvent, now: str
    ) -> None:
        metadata = graph["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": known.name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": graph["apiVersion"],
                "kind": graph["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message,
            "type": "Warning" if reason in WARNINGS else "Normal",
            "source": {"component": OPERATOR},
            "firstTimestamp": known.first,
            "lastTimestamp": now,
            "count": known.count,
        }
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        try:
            if known.count == 1:
                await self._link.request("POST", path, body)
            else:
                path, body = f"{path}/{known.name}", {"count": known.count, "lastTimestamp": now}
                await self._link.request("PATCH", path, body, content_type=MERGE_PATCH)
        except PlaneUnavailable as error:
            log.debug("event not written", extra={"fields": {"error": error.message}})
