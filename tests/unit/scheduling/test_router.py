"""Router, dispatch and operator chains with real clients on memory planes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.inference.conftest import JumpingClock
from tests.unit.processes import Open, send_through

from dynamo.communication.requests import ResponseWriter
from dynamo.core.clock import SystemClock
from dynamo.core.codec import ReplyEncoder, decode_request
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InstanceGone, NoWorkers, WorkerFailed
from dynamo.core.reply import LogprobsPerToken, Operator, Reply, SendRequest
from dynamo.core.values import Finish, GenerateRequest, SamplingParams, Started, StopConditions
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.dispatch import Dispatch
from dynamo.scheduling.pipeline import chain
from dynamo.scheduling.router import BasicPolicy, Decision, Policy, WorkerRouter
from dynamo.scheduling.router.attempt import Attempt, RankBalancer
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.telemetry import Registry

ENDPOINT = "dynamo.worker.generate"
CONTEXT = Context(request_id="r1")
REQUEST = GenerateRequest("r1", "tiny", b"\0\0\0\0", SamplingParams(), StopConditions())
MODES = ["round_robin", "basic", "random", "least-loaded", "power_of_two", "weighted"]


class RecordingReply(Reply):
    """Records tokens and wants no more after `limit` of them."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.ids: list[int] = []
        self.workers: list[str] = []
        self.ended = False

    def begin(self, started: Started) -> None:
        self.workers.append(started.worker)

    def tokens(self, ids: Any, logprobs: LogprobsPerToken | None = None) -> bool:
        self.ids += ids
        return self.limit is None or len(self.ids) < self.limit

    def finish(self, end: Finish) -> None:
        self.ended = True


async def serve(runtime: DistributedRuntime, handler: Any = None) -> Any:
    async def generate(payload: bytes, out: ResponseWriter) -> None:
        decode_request(payload)
        reply = ReplyEncoder(out.send, runtime.instance_id)
        reply.begin(Started())
        for token in (1, 2, 3):
            reply.tokens((token,))
        reply.finish(Finish("length", 3))

    return await runtime.endpoint(ENDPOINT).serve(handler or generate)


async def client_of(runtime: DistributedRuntime, instances: int) -> Client:
    client = await runtime.endpoint(ENDPOINT).client()
    if instances:
        await client.wait_for_instances(instances)
    return client


@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_reaches_every_worker(open_runtime: Open, mode: str) -> None:
    for _ in range(3):
        await serve(await open_runtime())
    send = send_through(await client_of(await open_runtime(), 3), mode)
    seen: Counter[str] = Counter()
    for _ in range(60):
        read = RecordingReply()
        await send(REQUEST, CONTEXT, read)
        assert read.ids == [1, 2, 3]
        assert read.ended
        seen.update(read.workers)
    assert len(seen) == 3


async def test_an_unknown_mode_is_an_error(open_runtime: Open) -> None:
    client = await client_of(await open_runtime(), 0)
    with pytest.raises(ConfigError, match="fastest"):
        BasicPolicy(client, "fastest")


async def test_no_workers_is_an_error(open_runtime: Open) -> None:
    send = send_through(await client_of(await open_runtime(), 0), "random")
    with pytest.raises(NoWorkers, match="no worker serves this model now"):
        await send(REQUEST, CONTEXT, RecordingReply())


async def test_a_decision_reports_its_mode_and_candidates(open_runtime: Open) -> None:
    for _ in range(2):
        await serve(await open_runtime())
    policy = BasicPolicy(await client_of(await open_runtime(), 2), "basic")
    first = await policy.choose(REQUEST, CONTEXT, frozenset())
    assert (first.mode, first.candidates) == ("round_robin", 2)
    other = await policy.choose(REQUEST, CONTEXT, {first.instance.id})
    assert other.candidates == 1
    assert other.instance.id != first.instance.id
    with pytest.raises(NoWorkers, match=r"available now.* 2 excluded for this call"):
        await policy.choose(REQUEST, CONTEXT, {first.instance.id, other.instance.id})


def test_an_outcome_counts_the_token_that_ended_the_answer() -> None:
    for end, tokens in ((Finish("stop", 3, 9), 3), (Finish("length", 2), 2)):
        ledger = Ledger()
        ledger.counts_tokens = True
        worker = ledger.workers.at(Instance("w", "", "", "", ""), None)
        placed = ledger.place("r/0/0", worker, Prompt(5, ()), new_tokens=5)
        decision = Decision(worker.instance, "kv", 1)
        attempt = Attempt(RecordingReply(), placed, ledger, decision=decision)
        attempt.begin(Started())
        attempt.tokens((1, 2))
        attempt.finish(end)
        ledger.end(placed, None)
        assert attempt.facts(0.0).output_tokens == tokens


async def test_a_gone_worker_is_retried_elsewhere(open_runtime: Open) -> None:
    async def gone(payload: bytes, out: ResponseWriter) -> None:
        raise InstanceGone("withdrawn")

    await serve(await open_runtime(), gone)
    await serve(good := await open_runtime())
    metrics = Registry()
    send = send_through(await client_of(await open_runtime(), 2), "round_robin", metrics)
    for _ in range(4):
        read = RecordingReply()
        await send(REQUEST, CONTEXT, read)
        assert read.workers == [good.instance_id]
    assert "dynamo_router_retries_total 1" in metrics.render()


async def test_an_incomplete_stream_is_a_failure(open_runtime: Open) -> None:
    async def breaks_off(payload: bytes, out: ResponseWriter) -> None:
        ReplyEncoder(out.send).tokens((1,))

    await serve(await open_runtime(), breaks_off)
    send = send_through(await client_of(await open_runtime(), 1), "random")
    with pytest.raises(WorkerFailed, match="before its answer"):
        await send(REQUEST, CONTEXT, RecordingReply())


async def test_a_reply_that_wants_no_more_ends_the_call(open_runtime: Open) -> None:
    await serve(await open_runtime())
    send = send_through(await client_of(await open_runtime(), 1), "random")
    read = RecordingReply(limit=2)
    await send(REQUEST, CONTEXT, read)
    assert read.ids == [1, 2]
    assert not read.ended


async def test_an_instance_without_the_endpoint_is_gone(open_runtime: Open) -> None:
    await serve(runtime := await open_runtime())
    client = await client_of(await open_runtime(), 1)
    (instance,) = client.instances.values()
    strange = await (await open_runtime()).endpoint("dynamo.worker.other").client()
    del runtime
    with pytest.raises(InstanceGone):
        await Dispatch(strange).send(instance, REQUEST, CONTEXT, RecordingReply())


class ScriptedPolicy(Policy):
    """Chooses the given instances in order."""

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        name = self._names.pop(0)
        assert name not in tried
        return Decision(Instance(name, "", "", "", ""), "scripted", 1)


async def test_at_most_three_attempts() -> None:
    attempts: list[tuple[str, int]] = []

    async def gone(instance: Instance, request: Any, context: Context, reply: Reply) -> None:
        attempts.append((instance.id, context.attempt))
        raise InstanceGone(instance.id)

    with pytest.raises(InstanceGone, match="c"):
        await WorkerRouter(ScriptedPolicy("a", "b", "c", "d"), gone).send(
            REQUEST, CONTEXT, RecordingReply()
        )
    assert attempts == [("a", 0), ("b", 1), ("c", 2)]


async def test_a_failed_worker_is_not_retried() -> None:
    async def failed(instance: Instance, request: Any, context: Context, reply: Reply) -> None:
        raise WorkerFailed(instance.id)

    with pytest.raises(WorkerFailed, match="a"):
        await WorkerRouter(ScriptedPolicy("a", "b"), failed).send(
            REQUEST, CONTEXT, RecordingReply()
        )


class PrefillElsewhere(ScriptedPolicy):
    """Names one prefill worker for every request."""

    def __init__(self, prefill: Instance, *names: str) -> None:
        super().__init__(*names)
        self._prefill = prefill

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        decision = await super().choose(request, context, tried)
        return replace(decision, prefill=self._prefill)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_request_is_a_call_of_its_prefill_worker_until_the_first_token(
    open_runtime: Open, *, fails: bool
) -> None:
    await serve(prefill := await open_runtime())
    client = await client_of(await open_runtime(), 1)
    (instance,) = client.instances.values()
    busy: list[list[str]] = []

    async def answer(_: Instance, request: Any, context: Context, reply: Reply) -> None:
        busy.append([instance.id for instance in client.busy_instances()])
        if fails:
            raise WorkerFailed("d")
        reply.tokens((1,))
        busy.append([instance.id for instance in client.busy_instances()])

    ledger = Ledger(SystemClock(), client)
    policy = PrefillElsewhere(instance, "d")
    router = WorkerRouter(policy, answer, prefill_client=client, ledger=ledger)
    with suppress(WorkerFailed):
        await router.send(REQUEST, CONTEXT, RecordingReply())
    busy.append([instance.id for instance in client.busy_instances()])
    p = prefill.instance_id
    assert busy == ([[p], []] if fails else [[p], [], []])


async def test_a_failure_keeps_the_name_of_the_prefill_worker(open_runtime: Open) -> None:
    async def fail(payload: bytes, out: ResponseWriter) -> None:
        error = WorkerFailed("prefill worker p failed")
        error.instance = "p"
        raise error

    await serve(await open_runtime(), fail)
    client = await client_of(await open_runtime(), 1)
    send = send_through(client, "random", clock=JumpingClock())
    with pytest.raises(WorkerFailed) as caught:
        await send(REQUEST, CONTEXT, RecordingReply())
    assert caught.value.instance == "p"


def test_the_rank_with_the_fewest_requests_is_chosen() -> None:
    engine = {"engine": {"data_parallel": 3}}
    worker = Instance("w", "memory://w", "n", "worker", "generate", engine)
    plain = Instance("w", "memory://w", "n", "worker", "generate")
    ledger = Ledger()
    balancer = RankBalancer(ledger.workers)
    assert balancer.choose(plain, frozenset()) is None
    chosen = [balancer.choose(worker, frozenset()) for _ in range(6)]
    assert Counter(chosen) == {0: 2, 1: 2, 2: 2}
    for number, rank in enumerate((0, 0, 1)):
        ledger.place(str(number), ledger.workers.at(worker, rank), Prompt(5, ()), new_tokens=5)
    assert {balancer.choose(worker, frozenset()) for _ in range(3)} == {2}
    assert {balancer.choose(worker, frozenset({"w/2"})) for _ in range(3)} == {1}
    full = frozenset({"w/0", "w/1", "w/2"})
    assert {balancer.choose(worker, full) for _ in range(3)} == {2}
    assert len([*ledger.workers.all()]) == 2  # workers with requests only
    balancer.retain({"v"})
    assert not balancer._choices


class RecordingOperator(Operator):
    """Records when a request passes."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name = name
        self._notes = notes

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        self._notes.append(self._name)
        await call_next(request, context, reply)
        self._notes.append(f"/{self._name}")


async def test_operators_are_called_in_the_order_of_the_list() -> None:
    notes: list[str] = []

    async def last(request: GenerateRequest, context: Context, reply: Reply) -> None:
        notes.append("last")

    await chain([RecordingOperator("a", notes), RecordingOperator("b", notes)], last)(
        REQUEST, CONTEXT, RecordingReply()
    )
    assert notes == ["a", "b", "last", "/b", "/a"]
    notes.clear()
    await chain([], last)(REQUEST, CONTEXT, RecordingReply())
    assert notes == ["last"]
