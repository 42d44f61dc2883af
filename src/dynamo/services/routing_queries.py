"""Queries for routing decisions, records and samples of all processes that route."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import DECODE_ERRORS, DynamoError, ProtocolError
from dynamo.core.tasks import run_all
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.router.collector.collector import DecisionCollector, PerformanceReport
from dynamo.scheduling.router.collector.report import RoutingRecord
from dynamo.scheduling.router.explain.decision_log import Explanation, http_request_id
from dynamo.scheduling.router.explain.timeline import (
    DeploymentTimeline,
    TimelineSample,
    merge_samples,
    series_by_worker,
)
from dynamo.services.routing import ProcessRouting

log = logging.getLogger(__name__)

QUERY_COMPONENT, QUERY_ENDPOINT = "routing", "ask"
QUERY_TIMEOUT_S = 2.0

T = TypeVar("T")


class ExplanationQuery(msgspec.Struct, frozen=True, tag="explain"):
    """All decisions for a request; "" stands for the latest requests."""

    request_id: str


class RecordsQuery(msgspec.Struct, frozen=True, tag="records"):
    """The routing records between two Unix times."""

    start: float
    end: float


class TimelineQuery(msgspec.Struct, frozen=True, tag="timeline"):
    """The samples after a Unix time."""

    since: float


RoutingQuery = ExplanationQuery | RecordsQuery | TimelineQuery
MAX_RECENT_REQUESTS = 50

_encode = msgspec.msgpack.Encoder().encode
_decode_query = msgspec.msgpack.Decoder(RoutingQuery).decode


class RoutingQueries:
    """Answers queries of other processes, and merges their answers for this one's HTTP routes."""

    def __init__(self, runtime: DistributedRuntime, routing: ProcessRouting) -> None:
        self._runtime = runtime
        self._routing = routing
        self._client: Client | None = None

    async def start(self) -> None:
        """Serve until the runtime shuts down, if the router mode records decisions."""
        if not self._routing.records_decisions:
            return
        endpoint = self._runtime.namespace().component(QUERY_COMPONENT).endpoint(QUERY_ENDPOINT)
        await endpoint.serve(self._handle_query)
        self._client = await endpoint.client()

    @property
    def records_decisions(self) -> bool:
        """Whether the router mode records decisions."""
        return self._routing.records_decisions

    async def explain(self, request_id: str) -> list[Explanation]:
        """Return the decisions for a request, oldest first; "" stands for the latest requests."""
        own = self._local_explanations(request_id)
        query = ExplanationQuery(request_id)
        explanations = merge_explanations(await self._gather(query, own, list[Explanation]))
        if not request_id or any(item.request_id == request_id for item in explanations):
            return explanations
        ids = [http_request_id(item.request_id, request_id) for item in explanations]
        return [item for item, id_ in zip(explanations, ids, strict=True) if id_ == ids[-1]]

    async def report(self, seconds: float | None = None) -> PerformanceReport:
        """Return a report on the last `seconds`, or on all records."""
        now = self._runtime.clock.wall()
        start = 0.0 if seconds is None else now - seconds
        offload, collector = self._runtime.clock.offload, self._routing.observer.collector
        own = await offload(collector.records_between, start, now)
        records = await self._gather(RecordsQuery(start, now), list(own), list[RoutingRecord])
        return await offload(
            build_report, records, collector, None if seconds is None else (start, now)
        )

    async def timeline(
        self, since: float = 0.0, seconds: float | None = None
    ) -> DeploymentTimeline:
        """Return the samples of all workers after a Unix time, or of the last `seconds`."""
        clock = self._runtime.clock
        after = since if seconds is None else max(since, clock.wall() - seconds)
        own = await clock.offload(self._routing.timeline.samples_since, after)
        samples = await self._gather(TimelineQuery(after), own, list[TimelineSample])
        return await clock.offload(lambda: series_by_worker(merge_samples(samples)))

    async def _handle_query(self, payload: bytes, out: ResponseWriter) -> None:
        try:
            query = _decode_query(payload)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"the payload is not a query for routing data: {error}") from error
        routing, offload = self._routing, self._runtime.clock.offload
        if isinstance(query, ExplanationQuery):
            out.send(_encode(self._local_explanations(query.request_id)))
        elif isinstance(query, RecordsQuery):
            collector = routing.observer.collector
            out.send(_encode(await offload(collector.records_between, query.start, query.end)))
        else:
            out.send(_encode(await offload(routing.timeline.samples_since, query.since)))

    def _local_explanations(self, request_id: str) -> list[Explanation]:
        explained = self._routing.observer.decision_log
        return explained.find(request_id) if request_id else explained.latest(MAX_RECENT_REQUESTS)

    async def _gather(self, query: RoutingQuery, own: Sequence[T], kind: Any) -> list[T]:
        """Return the items of all processes; one that does not answer in time is left out."""
        client = self._client
        if client is None:
            return list(own)
        own_id = self._runtime.instance_id
        others = [other for name, other in client.instances.items() if name != own_id]
        answers = await run_all(
            *(self._query_instance(client, other, query, kind) for other in others)
        )
        return [*own, *(item for answer in answers for item in answer)]

    async def _query_instance(
        self, client: Client, instance: Instance, query: RoutingQuery, kind: Any
    ) -> list[Any]:
        context = Context("routing", timeout_s=QUERY_TIMEOUT_S)
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                answers = await client.collect(instance, _encode(query), context)
            items: list[Any] = msgspec.msgpack.decode(b"".join(answers), type=kind)
        except (DynamoError, TimeoutError, *DECODE_ERRORS) as error:
            fields = {"instance": instance.id, "error": str(error)}
            log.warning("a routing process did not answer", extra={"fields": fields})
            return []
        return items


def merge_explanations(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Join the explanations of routers (costs) and frontends (outcomes). The newest come last."""
    merged: dict[tuple[str, int, str, int], Explanation] = {}
    counts: defaultdict[tuple[str, str, int, str], int] = defaultdict(int)
    for item in sorted(explanations, key=lambda item: (item.at, bool(item.costs))):
        source = (item.router, item.request_id, item.choice, item.worker)
        key = (item.request_id, item.choice, item.worker, counts[source])
        counts[source] += 1
        other = merged.get(key)
        merged[key] = item if other is None else _join_explanations(other, item)
    return list(merged.values())


def _join_explanations(first: Explanation, second: Explanation) -> Explanation:
    decided, answered = (first, second) if first.costs else (second, first)
    return replace(decided, outcome=answered.outcome or decided.outcome)


def build_report(
    records: Sequence[RoutingRecord],
    collector: DecisionCollector,
    time_range: tuple[float, float] | None,
) -> PerformanceReport:
    """Return a report on the records of several processes, with this collector's alerts."""
    ordered = sorted(records, key=lambda record: record.timestamp)
    return collector.with_records(ordered).report(time_range)
