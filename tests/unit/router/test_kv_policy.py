"""Mode kv over real clients on memory planes, and the KvRouter library beside it."""

from __future__ import annotations

import asyncio
import operator
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.processes import Open, send_through
from tests.unit.router.fake_cluster import ENGINE

from dynamo.communication.requests import ResponseWriter
from dynamo.core.codec import ReplyEncoder, decode_request
from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, NoWorkers
from dynamo.core.hashing import block_hashes
from dynamo.core.kv_events import worker_name
from dynamo.core.labels import LABELS_KEY
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.settings.schema_engine import EngineSettings as EngineSettings
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import (
    BlocksStored,
    Finish,
    GenerateRequest,
    Load,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.inference.load_publisher import encode_load
from dynamo.inference.mock.engine import make_mock_engine_info
from dynamo.library import kv_router
from dynamo.operations.observer.explanations import describe_decision
from dynamo.runtime import Client, DistributedRuntime
from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE
from dynamo.scheduling.router import (
    Decision,
    KvRouter,
    Observer,
    SchedulingRequest,
    WorkerScore,
    WorkerSelector,
    WorkerStatus,
)
from dynamo.scheduling.router.attempt import Attempt
from dynamo.scheduling.router.costs.interface import REGRET_WINDOW
from dynamo.scheduling.router.factory import open_policy
from dynamo.scheduling.router.policies import kv
from dynamo.scheduling.router.policy import PolicyInputs
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.telemetry.story import AttemptFacts

ENDPOINT = "dynamo.worker.generate"
IDS = array("I", range(160))
REQUEST = GenerateRequest("r1", "tiny", IDS.tobytes(), SamplingParams(), StopConditions())
CONTEXT = Context(request_id="r1")


class RecordingReply(Reply):
    """Record the tokens and the worker that answered."""

    def __init__(self) -> None:
        self.worker = ""
        self.ids: list[int] = []

    def begin(self, started: Started) -> None:
        self.worker = started.worker

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        self.ids += ids
        return True

    def finish(self, end: Finish) -> None:
        pass


class RecordingObserver(Observer):
    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.attempts: list[AttemptFacts] = []

    def on_attempt_started(self, attempt: Attempt) -> None:
        self.decisions += filter(None, [attempt.decision])

    def on_attempt_ended(self, attempt: Attempt) -> None:
        self.attempts.append(attempt.facts(0.0))


async def serve(
    runtime: DistributedRuntime,
    cached: Sequence[int] = (),
    rank: int | None = None,
    **capabilities: Any,
) -> str:
    """Serve a worker that answers three tokens; it, or its `rank`, publishes `cached` blocks."""

    async def generate(payload: bytes, out: ResponseWriter) -> None:
        decode_request(payload)
        reply = ReplyEncoder(out.send, runtime.instance_id)
        reply.begin(Started(cached_tokens=16))
        for token in (1, 2, 3):
            reply.tokens((token,))
        reply.finish(Finish("length", 3))

    name = worker_name(runtime.instance_id, rank)
    source = await runtime.events.open_source("dynamo.worker.kv_events", name)
    if cached:
        source.publish(msgspec.msgpack.encode([BlocksStored(0, tuple(cached))]))
    await runtime.endpoint(ENDPOINT).serve(generate, capabilities={"engine": ENGINE} | capabilities)
    return runtime.instance_id


async def open_kv_policy(runtime: DistributedRuntime, workers: int) -> tuple[Client, kv.KvPolicy]:
    client = await runtime.endpoint(ENDPOINT).client()
    if workers:
        await client.wait_for_instances(workers)
    ledger = Ledger(runtime.clock, client)
    policy = await open_policy(
        PolicyInputs(
            runtime.settings.router, client, runtime.events, runtime.clock, ledger, block_tokens=16
        )
    )
    assert isinstance(policy, kv.KvPolicy)
    return client, policy


async def test_a_request_goes_to_the_worker_that_holds_its_prompt(open_runtime: Open) -> None:
    await serve(await open_runtime())
    holder = await serve(await open_runtime(), block_hashes(REQUEST.token_ids))
    client, policy = await open_kv_policy(await open_runtime(), 2)
    while not policy.solver.view.find_overlaps(block_hashes(REQUEST.token_ids)):
        await asyncio.sleep(0)
    observer = RecordingObserver()
    send = send_through(client, policy, ledger=policy.solver.ledger, observers=[observer])
    await send(REQUEST, CONTEXT, reply := RecordingReply())
    assert (reply.worker, reply.ids) == (holder, [1, 2, 3])
    (decision,), (outcome,) = observer.decisions, observer.attempts
    assert (decision.overlap_blocks, decision.prompt_blocks, decision.view) == (10, 10, "exact")
    assert (outcome.cached_tokens, outcome.prompt_tokens, outcome.output_tokens) == (16, 160, 3)
    assert (outcome.error, outcome.first_us is None) == ("", False)
    assert not policy.solver.worker_states[holder].active
    await policy.close()


async def test_no_overlap_is_expected_without_a_prefix_cache(open_runtime: Open) -> None:
    engine = make_mock_engine_info(EngineSettings(prefix_caching=False), context_tokens=4096)
    name = await serve(await open_runtime(), engine=msgspec.to_builtins(engine))
    client, policy = await open_kv_policy(await open_runtime(), 1)
    observer = RecordingObserver()
    send = send_through(client, policy, ledger=policy.solver.ledger, observers=[observer])
    for _ in range(2):
        await send(REQUEST, CONTEXT, RecordingReply())
    assert [(decision.overlap_blocks, decision.view) for decision in observer.decisions] == [
        (0, NO_PREFIX_CACHE)
    ] * 2
    assert "no prefix cache" in describe_decision(observer.attempts[1])
    assert policy.solver.view.get_mode(name) == NO_PREFIX_CACHE
    await policy.close()


async def test_load_reports_reach_the_worker_states(open_runtime: Open) -> None:
    worker = await open_runtime()
    name = await serve(worker)
    router = await open_runtime()
    _, policy = await open_kv_policy(router, 1)
    loads = LoadView(router.clock)
    loads.add_listener(policy.solver.worker_states.on_load_report)
    await loads.subscribe(router.events, "dynamo.worker")
    source = await worker.events.open_source("dynamo.worker.load_metrics", name)
    source.publish(msgspec.msgpack.encode(Load(active_blocks=3, total_blocks=4)))
    worker_state = policy.solver.worker_states[name]
    while worker_state.load is None:
        await asyncio.sleep(0)
    assert worker_state.kv_cache_usage() == 0.75
    loads.close()
    await policy.close()


async def test_choose_raises_without_an_untried_worker(open_runtime: Open) -> None:
    client, policy = await open_kv_policy(await open_runtime(), 0)
    with pytest.raises(NoWorkers, match="no worker"):
        await policy.choose(REQUEST, CONTEXT, frozenset())
    await serve(await open_runtime())
    await client.wait_for_instances(1)
    decision = await policy.choose(REQUEST, CONTEXT, frozenset())
    with pytest.raises(NoWorkers):
        await policy.choose(REQUEST, CONTEXT, {decision.instance.id})
    await policy.close()


async def test_a_cancelled_choice_leaves_no_active_request(open_runtime: Open) -> None:
    await serve(await open_runtime())
    _, policy = await open_kv_policy(await open_runtime(), 1)
    async with BackgroundTasks() as tasks:
        choosing = tasks.start(policy.choose(REQUEST, CONTEXT, frozenset()))
        await asyncio.sleep(0)
        choosing.cancel()
        await asyncio.wait([choosing])
    assert len(policy.solver) == 0
    assert not any(worker_state.active for worker_state in policy.solver.worker_states.workers)
    await policy.close()


async def test_requests_of_one_turn_spread(open_runtime: Open) -> None:
    for _ in range(3):
        await serve(await open_runtime())
    _, policy = await open_kv_policy(await open_runtime(), 3)
    requests = [
        replace(REQUEST, token_ids=array("I", [number] * 1600).tobytes()) for number in range(3)
    ]
    decisions = await run_all(
        *(
            policy.choose(request, Context(f"q{number}"), frozenset())
            for number, request in enumerate(requests)
        )
    )
    assert len({decision.instance.id for decision in decisions}) == 3
    await policy.close()


async def test_a_cut_round_goes_on_without_an_event(
    open_runtime: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives during the round is placed in the next one, which follows at once."""
    monkeypatch.setattr(kv, "MAX_TURN_S", 0.0)
    await serve(await open_runtime())
    _, policy = await open_kv_policy(await open_runtime(), 1)
    rounds = []
    refresh_next = policy.solver.worker_states.refresh_next
    monkeypatch.setattr(
        policy.solver.worker_states, "refresh_next", lambda now: rounds.append(refresh_next(now))
    )
    async with BackgroundTasks() as tasks:

        def choose(number: int) -> asyncio.Task[Decision]:
            return tasks.start(policy.choose(REQUEST, Context(f"q{number}"), frozenset()))

        choices = [choose(number) for number in range(40)]
        decided = [0]
        while decided[-1] < len(choices):
            await asyncio.sleep(0)
            decided.append(sum(choice.done() for choice in choices))
            if decided[-1] and len(choices) == 40:
                choices.append(choose(40))
            assert len(decided) < 20
        assert max(map(operator.sub, decided[1:], decided)) <= REGRET_WINDOW
    assert len(rounds) == 2
    await policy.close()


async def test_labels_are_respected(open_runtime: Open) -> None:
    await serve(await open_runtime(), block_hashes(REQUEST.token_ids))
    labelled: Any = {LABELS_KEY: {"zone": "b"}}
    other = await serve(await open_runtime(), **labelled)
    _, policy = await open_kv_policy(await open_runtime(), 2)
    context = Context("r2", metadata={LABELS_KEY: "zone=b"})
    decision = await policy.choose(REQUEST, context, frozenset())
    assert decision.instance.id == other
    await policy.close()


class RecordingSelector(WorkerSelector):
    """Choose the first worker and record the constraints."""

    constraints: ClassVar[list[Mapping[str, str]]] = []

    def select_worker(
        self, worker_scores: Mapping[str, WorkerScore], constraints: Mapping[str, str]
    ) -> str:
        self.constraints.append(constraints)
        return next(iter(worker_scores))


async def test_a_selector_receives_the_constraints_of_the_request(
    open_runtime: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = SimpleNamespace(name="recording", load=lambda: RecordingSelector)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    labelled: Any = {LABELS_KEY: {"zone": "b", "gpu": "x"}}
    await serve(await open_runtime(), **labelled)
    runtime = await open_runtime()
    client = await runtime.endpoint(ENDPOINT).client()
    await client.wait_for_instances(1)
    settings = replace(runtime.settings.router, selector="recording")
    ledger = Ledger(runtime.clock, client)
    policy = await open_policy(
        PolicyInputs(settings, client, runtime.events, runtime.clock, ledger, block_tokens=16)
    )
    for labels in ({}, {LABELS_KEY: "zone=b, gpu=x"}):
        await policy.choose(REQUEST, Context("r2", metadata=labels), frozenset())
    assert RecordingSelector.constraints == [{}, {"zone": "b", "gpu": "x"}]
    await policy.close()


async def test_kv_router_as_a_library(open_runtime: Open) -> None:
    await serve(await open_runtime())
    holder = await serve(await open_runtime(), block_hashes(REQUEST.token_ids)[:5])
    runtime = await open_runtime()
    component = runtime.namespace("dynamo").component("worker")
    async with KvRouter(component, 16, tokenizer=lambda text: [len(text)] * 32) as router:
        prefix = router.analyze_request_prefix(SchedulingRequest(token_ids=IDS))
        while not router.query_cache_hits(prefix).best_hit_worker:
            await asyncio.sleep(0)
        result = await router.route_request(SchedulingRequest(token_ids=IDS))
        assert (result.worker.id, result.cache_hit_ratio) == (holder, 0.5)
        prefix = router.analyze_request_prefix(SchedulingRequest(prompt="hello"))
        assert (prefix.sequence_length, prefix.prefix_patterns) == (32, [16, 32])
    async with KvRouter(component) as router:
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await router.route_request(SchedulingRequest(prompt="hello"))


async def test_kv_router_routes_to_ranks(open_runtime: Open) -> None:
    await serve(await open_runtime())
    serving = await open_runtime()
    ranked: Any = {"engine": ENGINE | {"data_parallel": 2}}
    holder = await serve(serving, block_hashes(REQUEST.token_ids)[:5], rank=1, **ranked)
    loads = await serving.events.open_source("dynamo.worker.load_metrics", holder)
    first = Load(running=5, waiting=15, prefill_tokens=4_000, active_blocks=90, total_blocks=100)
    loads.publish(encode_load(replace(first, ranks=(first, Load(total_blocks=100)))))
    runtime = await open_runtime()
    async with KvRouter(runtime.namespace("dynamo").component("worker"), 16) as router:
        prefix = router.analyze_request_prefix(SchedulingRequest(token_ids=IDS))
        while not router.query_cache_hits(prefix).best_hit_worker:
            await asyncio.sleep(0)
        while not router.worker_status(f"{holder}/0").network_latency:
            await asyncio.sleep(0)
        busy, idle = (router.worker_status(f"{holder}/{rank}") for rank in (0, 1))
        assert busy.cpu_utilization == 0.4
        assert busy.available_memory_ratio == pytest.approx(0.1)
        assert idle == WorkerStatus()
        result = await router.route_request(SchedulingRequest(token_ids=IDS))
        assert (result.worker.id, result.rank, result.cache_hit_ratio) == (holder, 1, 0.5)


async def test_kv_router_prefers_the_less_busy_rank(open_runtime: Open) -> None:
    serving = await open_runtime()
    holder = await serve(serving, engine=ENGINE | {"data_parallel": 2})
    loads = await serving.events.open_source("dynamo.worker.load_metrics", holder)
    busy = Load(running=50, prefill_tokens=4_000)
    loads.publish(encode_load(replace(busy, ranks=(busy, Load()))))
    runtime = await open_runtime()
    async with KvRouter(runtime.namespace("dynamo").component("worker"), 16) as router:
        while not router.worker_status(f"{holder}/0").cpu_utilization:
            await asyncio.sleep(0)
        chosen = [await router.route_request(SchedulingRequest(token_ids=[0] * 8)) for _ in "1234"]
        assert {(result.worker.id, result.rank) for result in chosen} == {(holder, 1)}


async def test_kv_router_forgets_old_requests_of_workers_without_reports(
    open_runtime: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_router, "MAX_UNREPORTED_REQUESTS", 8)
    holder = await serve(await open_runtime())
    runtime = await open_runtime()
    async with KvRouter(runtime.namespace("dynamo").component("worker"), 16) as router:
        while not router.query_cache_hits(router.analyze_request_prefix(COLD)).worker_hits:
            await asyncio.sleep(0)
        for _ in range(20):
            await router.route_request(COLD)
        assert router.worker_status(holder).cpu_utilization == 8 / ENGINE["max_num_seqs"]


async def test_kv_router_counts_what_it_routed_until_the_next_report(open_runtime: Open) -> None:
    serving = [await open_runtime() for _ in range(4)]
    holders = [await serve(runtime) for runtime in serving]
    loads = [
        await runtime.events.open_source("dynamo.worker.load_metrics", holder)
        for runtime, holder in zip(serving, holders, strict=True)
    ]
    runtime = await open_runtime()
    async with KvRouter(runtime.namespace("dynamo").component("worker"), 16) as router:
        while len(router.query_cache_hits(router.analyze_request_prefix(COLD)).worker_hits) < 4:
            await asyncio.sleep(0)
        first = await router.route_request(COLD)
        assert first.expected_latency > 1.0
        chosen = [(await router.route_request(COLD)).worker.id for _ in range(199)]
        counts = Counter([first.worker.id, *chosen])
        assert set(counts) == set(holders)
        assert max(counts.values()) <= 100
        others = [SchedulingRequest(token_ids=range(n, n + 10_000)) for n in range(1, 41)]
        waits = [(await router.route_request(other)).expected_latency for other in others]
        assert waits[-1] > 2 * waits[0]
        for source in loads:
            source.publish(encode_load(Load(running=1)))
        while router.worker_status(holders[0]).network_latency:
            await asyncio.sleep(0)


COLD = SchedulingRequest(token_ids=range(100_000))
