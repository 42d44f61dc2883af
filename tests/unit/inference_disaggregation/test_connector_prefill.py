"""Workers whose engines move KV by connectors of their own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.inference_disaggregation.pair import make_request
from tests.unit.inference_disaggregation.workers import LiveWorker, StartWorker

from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, WorkerFailed
from dynamo.core.reply import KvConnector, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest
from dynamo.inference.disaggregation import connector_prefill
from dynamo.inference.echo import EchoEngine
from dynamo.testing.fakes import CollectedReply


class FakeConnector(KvConnector):
    """Names a prompt by its tokens. `on_prefill` is awaited before each."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lease_s = 30.0
        self.failures: Counter[str] = Counter()
        self.computed: list[GenerateRequest] = []
        self.released: list[bytes] = []
        self.error: Exception | None = None
        self.may_compute = asyncio.Event()
        self.may_compute.set()
        self.cancelled = False

    async def prefill(self, request: GenerateRequest, context: Context) -> bytes:
        self.computed.append(request)
        try:
            await self.may_compute.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return b"kv of " + bytes(unpack_ids(request.token_ids))

    def release(self, kv: bytes) -> None:
        self.released.append(kv)


class ConnectedEngine(EchoEngine):
    """Echoes, and remembers the KV that came with each request."""

    def __init__(self, kind: str = "fake") -> None:
        super().__init__(context_tokens=4096, vocab_size=1000)
        self.kv_connector: FakeConnector = FakeConnector(kind)
        self.loaded: list[bytes] = []

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.loaded.append(request.kv)
        await super().generate(request, context, reply)


Pair = tuple[LiveWorker, ConnectedEngine, LiveWorker, FakeConnector]


@pytest.fixture
async def pair(start_worker: StartWorker) -> Pair:
    """Return a worker, its engine, and the worker that computes prompts for it with its
    connector."""
    engine, other = ConnectedEngine(), ConnectedEngine()
    return (
        await start_worker(engine=engine),
        engine,
        await start_worker(engine=other),
        other.kv_connector,
    )


async def answer(pair: Pair, *, prefill: str | None = None) -> None:
    """Let the first worker answer a request, and check the answer."""
    request = make_request(range(9), prefill=pair[2].id if prefill is None else prefill)
    reply = await pair[0].answer(request)
    assert reply.ids == list(range(9))
    assert reply.end is not None


def fallbacks(worker: LiveWorker) -> dict[str, float]:
    lines = worker.runtime.metrics.render().splitlines()
    counts = (line.rpartition(" ") for line in lines if "prefill_fallbacks_total{" in line)
    numbers = {name.partition('"')[2][:-2]: float(count) for name, _, count in counts}
    return {name: number for name, number in numbers.items() if number}


async def test_an_engine_gets_the_kv_of_the_worker_that_computed_the_prompt(pair: Pair) -> None:
    worker, engine, _, connector = pair
    await answer(pair)
    assert engine.loaded == [b"kv of " + bytes(range(9))]
    (computed,) = connector.computed
    assert (computed.prefill, computed.rank, computed.kv) == ("", None, b"")
    assert worker.sample("dynamo_worker_remote_prompts_total") == 1
    assert not fallbacks(worker)


async def test_the_rank_that_the_router_chose_computes_the_prompt(pair: Pair) -> None:
    await answer(pair, prefill=f"{pair[2].id}/1")
    (computed,) = pair[3].computed
    assert computed.rank == 1
    assert pair[1].loaded == [b"kv of " + bytes(range(9))]


async def test_requests_without_another_worker_pay_nothing(pair: Pair) -> None:
    for prefill in ("", pair[0].id, f"{pair[0].id}/1"):
        await answer(pair, prefill=prefill)
    assert pair[1].loaded == [b"", b"", b""]
    assert pair[0].sample("dynamo_worker_remote_prompts_total") == 0


async def test_a_prompt_with_logprobs_is_computed_where_it_is_answered(pair: Pair) -> None:
    request = replace(make_request(range(9), prefill=pair[2].id), prompt_logprobs=0)
    await pair[0].worker._prefill.generate(request, Context("r"), CollectedReply())
    assert (pair[1].loaded, pair[3].computed) == ([b""], [])


async def test_a_prompt_is_computed_here_if_the_other_worker_cannot(pair: Pair) -> None:
    worker, engine, other, connector = pair
    connector.error = WorkerFailed("no")
    await answer(pair)
    connector.error = None
    await other.worker.close()
    await answer(pair)
    await answer(pair, prefill="never-started")
    assert engine.loaded == [b""] * 3
    assert fallbacks(worker) == {"worker_failed": 1, "transfer gone": 2}


async def test_a_slow_worker_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine, _, connector = pair
    monkeypatch.setattr("dynamo.inference.disaggregation.peer_prefill.MIN_DEADLINE_S", 0.01)
    connector.may_compute.clear()
    await answer(pair)
    assert engine.loaded == [b""]
    assert fallbacks(worker) == {"transfer timeout": 1}
    while connector.computed and not connector.cancelled:
        await asyncio.sleep(0.01)


async def test_kv_whose_lease_may_have_ended_is_released_and_not_loaded(pair: Pair) -> None:
    worker, engine, _, connector = pair
    connector.lease_s = 0.0
    await answer(pair)
    assert engine.loaded == [b""]
    assert engine.kv_connector.released == [b"kv of " + bytes(range(9))]
    assert fallbacks(worker) == {"transfer stale": 1}


async def test_kv_of_another_incarnation_is_released_and_not_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, engine, other, _ = pair
    decode: Callable[..., connector_prefill.ComputedPrompt] = connector_prefill._decode_answer

    def restart(answers: list[bytes]) -> connector_prefill.ComputedPrompt:
        """Let discovery report a new incarnation before the answer is used."""
        client = worker.worker._prefill._client  # type: ignore[union-attr]
        instance = replace(client.instances[other.id], address="memory:new")
        client.instances = {other.id: instance}
        return decode(answers)

    monkeypatch.setattr(connector_prefill, "_decode_answer", restart)
    await answer(pair)
    assert engine.loaded == [b""]
    assert len(engine.kv_connector.released) == 1
    assert fallbacks(worker) == {"transfer gone": 1}


async def test_a_cancelled_request_ends_the_call(pair: Pair) -> None:
    connector = pair[3]
    connector.may_compute.clear()
    async with BackgroundTasks() as tasks:
        task = tasks.start(answer(pair))
        while not connector.computed:
            await asyncio.sleep(0.01)
        task.cancel()
        while not connector.cancelled:
            await asyncio.sleep(0.01)
    assert not pair[1].loaded


@pytest.mark.parametrize("answer", [b"\xc1", b"\x93\xc4\x01\xc1\x00\x00"])
async def test_a_malformed_answer_does_not_hide_a_cancellation(pair: Pair, answer: bytes) -> None:
    worker, _, other, _ = pair
    prefill, arrived = worker.worker._prefill, asyncio.Event()
    assert isinstance(prefill, connector_prefill.ConnectorPrefill)

    async def call(instance: object, payload: bytes, context: Context, receive: Any) -> None:
        receive(answer)
        arrived.set()
        await asyncio.Event().wait()

    instances = {other.id: prefill._client.instances[other.id]}
    prefill._client = SimpleNamespace(instances=instances, call=call)  # type: ignore[assignment]
    request = make_request(range(9), prefill=other.id)
    async with BackgroundTasks() as tasks:
        task = tasks.start(prefill.generate(request, Context("r"), CollectedReply()))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_loads_that_the_engine_reports_as_failed_are_counted(pair: Pair) -> None:
    pair[1].kv_connector.failures["vllm transfers"] += 2
    assert fallbacks(pair[0]) == {"vllm transfers": 2}


async def test_engines_with_other_connectors_exchange_nothing(start_worker: StartWorker) -> None:
    engine, other = ConnectedEngine(), ConnectedEngine("another")
    pair = (
        await start_worker(engine=engine),
        engine,
        await start_worker(engine=other),
        other.kv_connector,
    )
    await answer(pair)
    assert not other.kv_connector.computed
    assert fallbacks(pair[0]) == {"transfer gone": 1}


async def test_a_worker_whose_blocks_cannot_be_read_computes_nothing(pair: Pair) -> None:
    worker, engine, other, connector = pair
    for served in other.worker._endpoints:
        if served.capabilities:
            await served.announce({"blocks": {"tokenizer": 1}})
    await answer(pair)
    assert (engine.loaded, connector.computed) == ([b""], [])
    assert fallbacks(worker) == {"transfer gone": 1}


async def test_an_engine_that_started_without_a_connector_gets_no_role(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(engine=EchoEngine(context_tokens=4096))
    settings = worker.runtime.settings
    engine = replace(settings.engine, kind="vllm")
    worker.runtime.settings = replace(settings, engine=engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynamo.inference.engines.arguments.find_spec", lambda _: object())
        with pytest.raises(InvalidRequest, match="started without a connector"):
            await worker.call("set_role", b"decode", lambda _: True)
