"""A worker that sleeps: it leaves every view, keeps no block, and answers again when it is woken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.codec import ReplyDecoder, encode_request
from dynamo.core.context import Context
from dynamo.core.errors import (
    DynamoError,
    ModelUnavailable,
    ProtocolError,
    Unsupported,
    WorkerFailed,
)
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import BlocksCleared, GenerateRequest
from dynamo.inference.echo import EchoEngine
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.runtime.calls.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.sleep import (
    SLEEP_ENDPOINT,
    SleepAnswer,
    SleepOrder,
    encode_sleep_order,
    sleep_level,
)
from dynamo.scheduling.admission.sleeping_workers import SleepingWorkers

CONTEXT = Context("r")
MakeEngine = Callable[..., BatchedEngine]
MakeRequest = Callable[..., GenerateRequest]
PROMPT = range(40)


class SleepyWorker:
    """A worker of one engine over memory planes."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.component = runtime.namespace("unit").component("worker")

    async def start(self, engine: Engine) -> EngineWorker:
        """Serve an engine."""
        card = ModelCard(names=("tiny",), context_tokens=9999, vocab_size=9, tokenizer=None)
        self.worker = EngineWorker(engine, card)
        await self.worker.attach(self.runtime)
        return self.worker

    async def order(self, level: int) -> SleepAnswer:
        """Send an order to sleep, or to wake up (0)."""
        client = await self.component.endpoint(SLEEP_ENDPOINT).client()
        await client.wait_for_instances(1, timeout_s=5)
        (instance,) = client.instances.values()
        try:
            parts = await client.collect(instance, encode_sleep_order(SleepOrder(level)), CONTEXT)
        finally:
            await client.close()
        return msgspec.json.decode(b"".join(parts), type=SleepAnswer)

    async def answer(self, client: Client, request: GenerateRequest) -> RecordingReply:
        """Let the worker answer a request."""
        reply = RecordingReply()
        await client.wait_for_instances(1, timeout_s=5)
        instance = client.pick("round_robin")
        await client.call(instance, encode_request(request), CONTEXT, ReplyDecoder(reply).feed)
        return reply

    async def keys(self) -> set[str]:
        """Return the endpoints in discovery."""
        return {key.split("/")[-2] for key in await self.runtime.discovery.get("/unit/workers/")}


@pytest.fixture
async def sleepy() -> AsyncIterator[SleepyWorker]:
    planes = RuntimeSettings(
        discovery="memory:", requests="memory:", events="memory:", namespace="unit"
    )
    async with await DistributedRuntime.create(Settings(runtime=planes), role="worker") as runtime:
        yield SleepyWorker(runtime)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_worker_leaves_while_it_sleeps_and_answers_the_same_afterwards(
    sleepy: SleepyWorker, make_engine: MakeEngine, make_request: MakeRequest, level: int
) -> None:
    engine = make_engine(speedup_ratio=1e6)
    worker = await sleepy.start(engine)
    served = await sleepy.keys()
    states: list[str] = []

    async def publish(state: Any) -> None:
        states.append(state)

    sleepy.runtime.publish_state = publish
    generate = await sleepy.component.endpoint("generate").client()
    first = await sleepy.answer(generate, make_request(PROMPT, max_tokens=5))
    events: list[Any] = []
    engine.on_kv_events(events.extend)

    answer = await sleepy.order(level)
    assert (answer.level, answer.changed) == (level, True)
    assert served - await sleepy.keys() == {"generate"}
    assert engine.snapshot_kv_events() == []
    assert isinstance(events[0], BlocksCleared)
    sample = f'dynamo_worker_sleeping_ratio{{level="{level}"}} 1'
    assert sample in sleepy.runtime.metrics.render()
    assert "sleeps at level" in sleepy.runtime.health.reasons["sleep"]
    with pytest.raises(WorkerFailed, match="sleeps"):
        await engine.generate(make_request(PROMPT), CONTEXT, RecordingReply())
    assert await sleepy.order(level) == SleepAnswer(level, changed=False)

    steps = engine.totals().steps
    assert (await sleepy.order(0)).changed
    proved = engine.totals().steps > steps
    assert proved == (level == 2), "at level 1 the weights have not left their place"
    assert await sleepy.keys() == served
    assert sleepy.runtime.health.reasons == {}
    again = await sleepy.answer(generate, make_request(PROMPT, max_tokens=5))
    assert again.ids == first.ids
    assert again.started is not None
    assert again.started.cached_tokens == 0
    assert await sleepy.order(0) == SleepAnswer(0, changed=False)
    assert states == ["sleeping", "ready"]
    await worker.close()


async def test_requests_in_flight_end_before_the_worker_sleeps(
    sleepy: SleepyWorker, make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    worker = await sleepy.start(make_engine(timing="constant:0.5,1"))
    generate = await sleepy.component.endpoint("generate").client()
    async with BackgroundTasks() as tasks:
        answering = tasks.start(sleepy.answer(generate, make_request(PROMPT, max_tokens=50)))
        while not worker._engine.report_load().running:
            await asyncio.sleep(0)
        await sleepy.order(1)
        assert len((await answering).ids) == 50
    await worker.close()


@pytest.mark.parametrize("level", [1, 0])
async def test_a_process_ends_while_its_worker_falls_asleep_or_wakes_up(
    sleepy: SleepyWorker, make_engine: MakeEngine, make_request: MakeRequest, level: int
) -> None:
    engine = make_engine(timing="constant:0.5,1")
    worker = await sleepy.start(engine)
    sleepy.runtime.add_shutdown_hook(worker.close)
    generate = await sleepy.component.endpoint("generate").client()
    async with BackgroundTasks(lambda _: None) as tasks:
        if level:
            tasks.start(sleepy.answer(generate, make_request(PROMPT, max_tokens=50)))
            while not engine.report_load().running:
                await asyncio.sleep(0)
        else:
            await sleepy.order(2)  # a wake from level 1 takes no time
        tasks.start(sleepy.order(level))
        while not worker._sleep._lock.locked():
            await asyncio.sleep(0)
        await sleepy.runtime.shutdown(5.0)
    assert await sleepy.keys() == set()


async def test_an_engine_that_cannot_sleep_says_so_and_serves_on(sleepy: SleepyWorker) -> None:
    worker = await sleepy.start(EchoEngine(context_tokens=400))
    with pytest.raises(Unsupported, match="cannot sleep: it cannot give memory back"):
        await sleepy.order(1)
    assert "generate" in await sleepy.keys()
    assert not (await sleepy.order(0)).changed
    with pytest.raises(ProtocolError, match="no level of sleep 3"):
        await sleepy.order(3)
    await worker.close()


@pytest.mark.parametrize(("failing", "what"), [("sleep", "fall asleep"), ("wake_up", "wake up")])
async def test_a_failure_ends_the_process_and_nothing_is_served_half_awake(
    sleepy: SleepyWorker,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    what: str,
) -> None:
    engine = make_engine(speedup_ratio=1e6)
    worker = await sleepy.start(engine)

    async def fail(*_: Any) -> None:
        raise ModelUnavailable("the weights have changed")

    monkeypatch.setattr(engine.runner, failing, fail)
    if failing == "wake_up":
        await sleepy.order(1)
    with pytest.raises(WorkerFailed, match=f"could not {what}"):
        await sleepy.order(int(failing == "sleep"))
    assert sleepy.runtime.failure is not None
    assert sleepy.runtime.stopping.cancelled
    assert "generate" not in await sleepy.keys()
    await worker.close()


async def test_a_request_wakes_a_worker_as_soon_as_one_sleeps(
    sleepy: SleepyWorker, make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    worker = await sleepy.start(make_engine(speedup_ratio=1e6))
    generate = await sleepy.component.endpoint("generate").client()
    await generate.wait_for_instances(1, timeout_s=5)
    endpoint = sleepy.component.endpoint(SLEEP_ENDPOINT)
    sleepers = await endpoint.client(lambda instance: sleep_level(instance) > 0)
    sleeping = SleepingWorkers(generate, sleepers)
    assert not sleeping
    sleeping.wake_one()
    await sleepy.order(1)
    while not sleeping:
        await asyncio.sleep(0)
    assert not generate.instances
    sleeping.wake_one()  # the first one was not wanted any more: a worker served
    await sleepy.answer(generate, make_request(PROMPT))
    while sleeping:
        await asyncio.sleep(0)
    await sleeping.close()
    await worker.close()


async def test_a_worker_that_does_not_wake_is_asked_once(
    sleepy: SleepyWorker, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await sleepy.start(make_engine(speedup_ratio=1e6))
    endpoint = sleepy.component.endpoint(SLEEP_ENDPOINT)
    sleepers = await endpoint.client(lambda instance: sleep_level(instance) > 0)
    generate = await sleepy.component.endpoint("generate").client()
    await sleepy.order(1)
    await sleepers.wait_for_instances(1, timeout_s=5)
    calls: list[object] = []

    async def fail(*arguments: object) -> list[bytes]:
        calls.append(arguments)
        raise DynamoError("refused")

    monkeypatch.setattr(sleepers, "collect", fail)
    sleeping = SleepingWorkers(generate, sleepers)
    for _ in range(3):
        sleeping.wake_one()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(calls) == 1
    await sleeping.close()
    await worker.close()
