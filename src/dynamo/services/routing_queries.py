"""What several processes know of routing, as one answer: each keeps its own decisions."""

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
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import run_all
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.router.collector.collector import PerformanceReport, RoutingMetricsCollector
from dynamo.scheduling.router.collector.record import RoutingRecord
from dynamo.scheduling.router.explain.decision_log import Explanation, http_request_id
from dynamo.scheduling.router.explain.timeline import TimelineSample, WorkerSample
from dynamo.services.routing import ProcessRouting

log = logging.getLogger(__name__)

QUERY_COMPONENT, QUERY_ENDPOINT = "routing", "ask"
QUERY_TIMEOUT_S = 2.0

T = TypeVar("T")


class ExplanationQuery(msgspec.Struct, frozen=True, tag="explain"):
    """All decisions for a request; "" = the last ones."""

    request_id: str


class RecordsQuery(msgspec.Struct, frozen=True, tag="records"):
    """Decisions between two Unix times."""

    start: float
    end: float


class SamplesQuery(msgspec.Struct, frozen=True, tag="samples"):
    """Samples after a Unix time."""

    since: float


RoutingQuery = ExplanationQuery | RecordsQuery | SamplesQuery
MAX_RECENT_REQUESTS = 50

_encode = msgspec.msgpack.Encoder().encode
_decode_query = msgspec.msgpack.Decoder(RoutingQuery).decode


class RoutingQueries:
    """Answers for this process over the request plane, and for all of them to its HTTP routes."""

    def __init__(self, runtime: DistributedRuntime, routing: ProcessRouting) -> None:
        self._runtime = runtime
        self._routing = routing
        self._client: Client | None = None

    async def start(self) -> None:
        """Serve until the runtime shuts down, if there is anything to tell in this mode."""
        if not self._routing.records_decisions:
            return
        endpoint = self._runtime.namespace().component(QUERY_COMPONENT).endpoint(QUERY_ENDPOINT)
        await endpoint.serve(self._handle_query)
        self._client = await endpoint.client()

    @property
    def records_decisions(self) -> bool:
        """Whether decisions are remembered in the mode that is set."""
        return self._routing.records_decisions

    async def explain(self, request_id: str) -> list[Explanation]:
        """All that is known of a request; empty where it is unknown. "" = the last requests."""
        own = self._local_explanations(request_id)
        found = merge_explanations(
            await self._gather(ExplanationQuery(request_id), own, list[Explanation])
        )
        if not request_id or any(one.request_id == request_id for one in found):
            return found
        last = http_request_id(found[-1].request_id, request_id) if found else ""
        return [one for one in found if http_request_id(one.request_id, request_id) == last]

    async def report(self, seconds: float | None = None) -> PerformanceReport:
        """Of the last so many seconds, or of all that is remembered."""
        now = self._runtime.clock.wall()
        start = 0.0 if seconds is None else now - seconds
        offload, collector = self._runtime.clock.offload, self._routing.observer.collector
        own = await offload(collector.records_between, start, now)
        records = await self._gather(RecordsQuery(start, now), list(own), list[RoutingRecord])
        return await offload(
            build_report, records, collector, None if seconds is None else (start, now)
        )

    async def samples(self, since: float = 0.0) -> list[TimelineSample]:
        """Every worker over time."""
        own = self._routing.timeline.samples_since(since)
        return merge_samples(await self._gather(SamplesQuery(since), own, list[TimelineSample]))

    async def _handle_query(self, payload: bytes, out: ResponseWriter) -> None:
        question = _decode_query(payload)
        routing = self._routing
        if isinstance(question, ExplanationQuery):
            out.send(_encode(self._local_explanations(question.request_id)))
        elif isinstance(question, RecordsQuery):
            collector = routing.observer.collector
            between = await self._runtime.clock.offload(
                collector.records_between, question.start, question.end
            )
            out.send(_encode(between))
        else:
            out.send(_encode(routing.timeline.samples_since(question.since)))

    def _local_explanations(self, request_id: str) -> list[Explanation]:
        explained = self._routing.observer.decision_log
        return explained.find(request_id) if request_id else explained.latest(MAX_RECENT_REQUESTS)

    async def _gather(self, question: RoutingQuery, own: Sequence[T], kind: Any) -> list[T]:
        """This process's part and that of all others; who does not answer in time is left out."""
        client = self._client
        if client is None:
            return list(own)
        mine = self._runtime.instance_id
        others = [one for name, one in client.instances.items() if name != mine]
        parts = await run_all(
            *(self._query_instance(client, one, question, kind) for one in others)
        )
        return [*own, *(item for part in parts for item in part)]

    async def _query_instance(
        self, client: Client, instance: Instance, question: RoutingQuery, kind: Any
    ) -> list[Any]:
        answers: list[bytes] = []

        def sink(payload: bytes) -> bool:
            answers.append(payload)
            return True

        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                context = Context("routing", timeout_s=QUERY_TIMEOUT_S)
                await client.call(instance, _encode(question), context, sink)
            found: list[Any] = msgspec.msgpack.decode(answers[0], type=kind)
        except (
            DynamoError,
            TimeoutError,
            IndexError,
            msgspec.DecodeError,
            UnicodeDecodeError,
        ) as error:
            fields = {"instance": instance.id, "error": str(error)}
            log.warning("a router's part is missing", extra={"fields": fields})
            return []
        return found


def merge_explanations(found: Sequence[Explanation]) -> list[Explanation]:
    """Where a router of its own decided and a frontend knows the outcome, one explanation of both;
    newest requests last."""
    kept: dict[tuple[str, int, str, int], Explanation] = {}
    counts: defaultdict[tuple[str, str, int, str], int] = defaultdict(int)
    for one in sorted(found, key=lambda each: (each.at, bool(each.costs))):
        who = (one.router, one.request_id, one.choice, one.worker)
        key = (one.request_id, one.choice, one.worker, counts[who])
        counts[who] += 1
        there = kept.get(key)
        kept[key] = one if there is None else _join_explanations(there, one)
    return list(kept.values())


def _join_explanations(one: Explanation, other: Explanation) -> Explanation:
    decided, answered = (one, other) if one.costs else (other, one)
    return replace(decided, outcome=answered.outcome or decided.outcome)


def build_report(
    records: Sequence[RoutingRecord],
    like: RoutingMetricsCollector,
    time_range: tuple[float, float] | None,
) -> PerformanceReport:
    """A report over the records of several processes, with the alerts of this one."""
    collector = like.with_records(sorted(records, key=lambda one: one.timestamp))
    return collector.report(time_range)


def merge_samples(samples: Sequence[TimelineSample]) -> list[TimelineSample]:
    """One sample a moment: of loads the fullest report, of what was sent there the sum."""
    moments: dict[float, TimelineSample] = {}
    for one in sorted(samples, key=lambda each: each.at):
        there = moments.get(one.at)
        moments[one.at] = one if there is None else _add_sample(there, one)
    return list(moments.values())


def _add_sample(one: TimelineSample, other: TimelineSample) -> TimelineSample:
    workers = dict(one.workers)
    for name, sample in other.workers.items():
        there = workers.get(name)
        workers[name] = sample if there is None else _merge_worker_samples(there, sample)
    return TimelineSample(one.at, one.waiting + other.waiting, workers)


def _merge_worker_samples(one: WorkerSample, other: WorkerSample) -> WorkerSample:
    known = max(one, other, key=lambda each: (each.total_blocks, bool(each.view)))
    return replace(known, sent=one.sent + other.sent, routed=one.routed + other.routed)
