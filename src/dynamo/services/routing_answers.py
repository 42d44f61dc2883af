"""What several processes know of routing, as one answer: each keeps its own decisions."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from dynamo.communication.requests import Outgoing
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import run_all
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.collector.collector import PerformanceReport, RoutingMetricsCollector
from dynamo.scheduling.router.collector.record import RoutingRecord
from dynamo.scheduling.router.explain.explained import Explanation, own_id
from dynamo.scheduling.router.explain.timeline import Sample, WorkerSample
from dynamo.services.routing import Routing

log = logging.getLogger(__name__)

COMPONENT, ENDPOINT = "routing", "ask"
ANSWER_S = 2.0

T = TypeVar("T")


class AskExplanation(msgspec.Struct, frozen=True, tag="explain"):
    """All decisions for a request; "" = the last ones."""

    request_id: str


class AskRecords(msgspec.Struct, frozen=True, tag="records"):
    """Decisions between two Unix times."""

    start: float
    end: float


class AskSamples(msgspec.Struct, frozen=True, tag="samples"):
    """Samples after a Unix time."""

    since: float


Question = AskExplanation | AskRecords | AskSamples
LAST = 50

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Question).decode


class RoutingAnswers:
    """Answers for this process over the request plane, and for all of them to its HTTP routes."""

    def __init__(self, runtime: DistributedRuntime, routing: Routing) -> None:
        self._runtime = runtime
        self._routing = routing
        self._client: Client | None = None

    async def start(self) -> None:
        """Serve until the runtime shuts down, if there is anything to tell in this mode."""
        if not self._routing.explains:
            return
        endpoint = self._runtime.namespace().component(COMPONENT).endpoint(ENDPOINT)
        await endpoint.serve(self._answer)
        self._client = await endpoint.client()

    @property
    def explains(self) -> bool:
        """Whether decisions are remembered in the mode that is set."""
        return self._routing.explains

    async def explain(self, request_id: str) -> list[Explanation]:
        """All that is known of a request; empty where it is unknown. "" = the last requests."""
        own = self._explained(request_id)
        found = merged(await self._all(AskExplanation(request_id), own, list[Explanation]))
        if not request_id or any(one.request_id == request_id for one in found):
            return found
        last = own_id(found[-1].request_id, request_id) if found else ""
        return [one for one in found if own_id(one.request_id, request_id) == last]

    async def report(self, seconds: float | None = None) -> PerformanceReport:
        """Of the last so many seconds, or of all that is remembered."""
        now = self._runtime.clock.wall()
        start = 0.0 if seconds is None else now - seconds
        offload, collector = self._runtime.clock.offload, self._routing.watch.collector
        own = await offload(collector.between, start, now)
        records = await self._all(AskRecords(start, now), list(own), list[RoutingRecord])
        return await offload(
            report_of, records, collector, None if seconds is None else (start, now)
        )

    async def samples(self, since: float = 0.0) -> list[Sample]:
        """Every worker over time."""
        own = self._routing.timeline.since(since)
        return laid_together(await self._all(AskSamples(since), own, list[Sample]))

    async def _answer(self, payload: bytes, out: Outgoing) -> None:
        question = _decode(payload)
        routing = self._routing
        if isinstance(question, AskExplanation):
            out.send(_encode(self._explained(question.request_id)))
        elif isinstance(question, AskRecords):
            collector = routing.watch.collector
            between = await self._runtime.clock.offload(
                collector.between, question.start, question.end
            )
            out.send(_encode(between))
        else:
            out.send(_encode(routing.timeline.since(question.since)))

    def _explained(self, request_id: str) -> list[Explanation]:
        explained = self._routing.watch.explained
        return explained.find(request_id) if request_id else explained.last(LAST)

    async def _all(self, question: Question, own: Sequence[T], kind: Any) -> list[T]:
        """This process's part and that of all others; who does not answer in time is left out."""
        client = self._client
        if client is None:
            return list(own)
        mine = self._runtime.instance_id
        others = [one for name, one in client.instances.items() if name != mine]
        parts = await run_all(*(self._ask(client, one, question, kind) for one in others))
        return [*own, *(item for part in parts for item in part)]

    async def _ask(
        self, client: Client, instance: Instance, question: Question, kind: Any
    ) -> list[Any]:
        answers: list[bytes] = []

        def sink(payload: bytes) -> bool:
            answers.append(payload)
            return True

        try:
            async with asyncio.timeout(ANSWER_S):
                context = Context("routing", timeout_s=ANSWER_S)
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


def merged(found: Sequence[Explanation]) -> list[Explanation]:
    """Where a router of its own decided and a frontend knows the outcome, one explanation of both;
    newest requests last."""
    kept: dict[tuple[str, int, str, int], Explanation] = {}
    counts: defaultdict[tuple[str, str, int, str], int] = defaultdict(int)
    for one in sorted(found, key=lambda each: (each.at, bool(each.costs))):
        who = (one.router, one.request_id, one.choice, one.worker)
        key = (one.request_id, one.choice, one.worker, counts[who])
        counts[who] += 1
        there = kept.get(key)
        kept[key] = one if there is None else _joined(there, one)
    return list(kept.values())


def _joined(one: Explanation, other: Explanation) -> Explanation:
    decided, answered = (one, other) if one.costs else (other, one)
    return replace(decided, outcome=answered.outcome or decided.outcome)


def report_of(
    records: Sequence[RoutingRecord],
    like: RoutingMetricsCollector,
    time_range: tuple[float, float] | None,
) -> PerformanceReport:
    """A report over the records of several processes, with the alerts of this one."""
    collector = like.with_records(sorted(records, key=lambda one: one.timestamp))
    return collector.report(time_range)


def laid_together(samples: Sequence[Sample]) -> list[Sample]:
    """One sample a moment: of loads the fullest report, of what was sent there the sum."""
    moments: dict[float, Sample] = {}
    for one in sorted(samples, key=lambda each: each.at):
        there = moments.get(one.at)
        moments[one.at] = one if there is None else _with(there, one)
    return list(moments.values())


def _with(one: Sample, other: Sample) -> Sample:
    workers = dict(one.workers)
    for name, sample in other.workers.items():
        there = workers.get(name)
        workers[name] = sample if there is None else _both(there, sample)
    return Sample(one.at, one.waiting + other.waiting, workers)


def _both(one: WorkerSample, other: WorkerSample) -> WorkerSample:
    known = max(one, other, key=lambda each: (each.total_blocks, bool(each.view)))
    return replace(known, sent=one.sent + other.sent, routed=one.routed + other.routed)
