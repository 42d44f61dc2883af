"""Who is ejected, who comes back, and that half of the workers always stay; on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Set as AbstractSet
from functools import partial
from random import Random

import msgspec
import pytest
from tests.unit.processes import Processes, play_virtually

from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import (
    DynamoError,
    InvalidRequest,
    NoWorkers,
    ProtocolError,
    WorkerDraining,
    WorkerFailed,
)
from dynamo.core.reply import Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest, ProbeResult, SamplingParams, StopConditions
from dynamo.core.virtual_time import VirtualClock
from dynamo.runtime import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router import Decision, Policy, WorkerRouter
from dynamo.scheduling.worker_health import (
    ENGINE_STALL_S,
    INITIAL_OPEN_S,
    MAX_OPEN_S,
    Breaker,
    WorkerHealth,
)
from dynamo.testing.fakes import CollectedReply

ENDPOINT = "dynamo.worker.generate"
REQUEST = GenerateRequest("r", "m", b"\0\0\0\0", SamplingParams(), StopConditions())
CONTEXT = Context(request_id="r")


class Only(Policy):
    """One instance, while it may be tried."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        if self.instance.id in tried:
            raise NoWorkers("there is one alone")
        return Decision(self.instance, "only", 1)


class Ward:
    """Workers that answer a probe with `answers` (their beat, while there are none), never a call
    with a payload; and a client under `health`."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.processes = Processes(clock)
        self.ill: set[str] = set()
        self.error: DynamoError = WorkerFailed("broken")
        self.steps = 0
        self.requests = 0
        self.probes = 0
        self.answers: list[list[bytes]] = []
        self.calls = BackgroundTasks(on_failure=lambda _: None)

    async def start(self, workers: int) -> tuple[Client, WorkerHealth]:
        for _ in range(workers):
            await self.worker()
        runtime = await self.processes.open()
        client = await runtime.endpoint(ENDPOINT).client()
        await client.wait_for_instances(workers)
        self.metrics = runtime.metrics
        self.health = WorkerHealth(client, self.clock, Random(1), runtime.metrics)
        self.health.start()
        return client, self.health

    async def worker(self) -> None:
        runtime = await self.processes.open()

        async def handle(payload: bytes, out: ResponseWriter) -> None:
            self.probes += 1
            if runtime.instance_id in self.ill:
                raise self.error
            if payload:
                await asyncio.Event().wait()
            beat = [msgspec.msgpack.encode(ProbeResult(self.steps, self.requests))]
            for item in self.answers.pop(0) if self.answers else beat:
                out.send(item)

        await runtime.endpoint(ENDPOINT).serve(handle)

    async def answer(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        if instance.id in self.ill:
            raise self.error

    async def ask(self, instance: Instance, times: int = 1) -> None:
        for _ in range(times):
            await self.clock.sleep(1.0)
            router = WorkerRouter(
                Only(instance), self.answer, listener_factories=[self.health.track_attempt]
            )
            with contextlib.suppress(DynamoError):
                await router.send(REQUEST, CONTEXT, CollectedReply())

    async def close(self) -> None:
        await self.calls.close()
        await self.health.close()
        await self.processes.close()


scene = partial(play_virtually, Ward)


def test_three_failures_eject_and_a_probe_brings_it_back() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(3)
        bad = next(iter(client.instances.values()))
        ward.ill.add(bad.id)
        await ward.ask(bad, 2)
        assert bad.id in client.instances
        await ward.ask(bad)
        assert bad.id not in client.instances
        await ward.clock.sleep(20.0)
        assert bad.id not in client.instances
        ward.ill.clear()
        await ward.clock.sleep(MAX_OPEN_S)
        assert bad.id in client.instances

    scene(play)


def test_a_success_between_failures_forgives_them() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(3)
        one = next(iter(client.instances.values()))
        for _ in range(5):
            ward.ill.add(one.id)
            await ward.ask(one, 2)
            ward.ill.clear()
            await ward.ask(one)
        assert one.id in client.instances

    scene(play)


def test_half_open_one_failure_is_enough() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(3)
        bad = next(iter(client.instances.values()))
        ward.ill.add(bad.id)
        await ward.ask(bad, 3)
        ward.ill.clear()
        await ward.clock.sleep(2.0)
        assert bad.id in client.instances
        ward.ill.add(bad.id)
        await ward.ask(bad)
        assert bad.id not in client.instances

    scene(play)


@pytest.mark.parametrize(("workers", "left"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_half_of_all_stay_whatever_happens(workers: int, left: int) -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(workers)
        everybody = list(client.instances.values())
        ward.ill.update(one.id for one in everybody)
        for one in everybody:
            await ward.ask(one, 4)
        assert len(client.instances) == left

    scene(play)


@pytest.mark.parametrize("error", [InvalidRequest("no"), WorkerDraining("bye"), NoWorkers("none")])
def test_what_is_not_the_workers_fault_does_not_count(error: DynamoError) -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(2)
        one = next(iter(client.instances.values()))
        ward.ill.add(one.id)
        ward.error = error
        await ward.ask(one, 5)
        assert one.id in client.instances

    scene(play)


def test_idle_workers_are_probed_and_the_third_failure_ejects() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(2)
        bad = next(iter(client.instances))
        ward.ill.add(bad)
        await ward.clock.sleep(25.0)
        assert bad in client.instances
        await ward.clock.sleep(10.0)
        assert bad not in client.instances
        assert ward.probes >= 6

    scene(play)


def test_an_engine_that_has_work_and_computes_nothing_is_stuck() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(2)
        ward.requests, ward.steps = 1, 7
        await ward.clock.sleep(ENGINE_STALL_S - 5.0)
        assert len(client.instances) == 2
        await ward.clock.sleep(40.0)
        assert len(client.instances) == 1
        ward.steps = 8
        await ward.clock.sleep(2 * MAX_OPEN_S)
        assert len(client.instances) == 2

    scene(play)


def test_a_busy_one_that_gets_on_is_fit_however_slow() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(2)
        ward.requests = 50
        for _ in range(20):
            ward.steps += 1
            await ward.clock.sleep(30.0)
            assert len(client.instances) == 2

    scene(play)


def test_what_a_stuck_engine_has_goes_elsewhere_and_what_others_have_does_not() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(2)
        ward.requests, ward.steps = 1, 7
        calls = [
            ward.calls.start(client.call(one, b"x", CONTEXT, lambda _: True))
            for one in client.instances.values()
        ]
        await ward.clock.sleep(ENGINE_STALL_S - 10.0)
        assert not any(call.done() for call in calls)
        await ward.clock.sleep(45.0)
        for call in calls:
            with pytest.raises(WorkerFailed, match="is stuck"):
                await call

    scene(play)


def test_who_had_nothing_to_do_for_long_is_not_stuck_when_work_comes() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(2)
        await ward.clock.sleep(10 * ENGINE_STALL_S)
        ward.requests = 1
        await ward.clock.sleep(ENGINE_STALL_S - 15.0)
        assert len(client.instances) == 2

    scene(play)


@pytest.mark.parametrize("answer", [[], [b"no beat"]], ids=["nothing", "unreadable"])
def test_no_beat_is_no_answer_and_a_beat_between_forgives(answer: list[bytes]) -> None:
    async def play(ward: Ward) -> None:
        await ward.start(2)
        beat = [msgspec.msgpack.encode(ProbeResult())]
        ward.answers = ([answer] * 4 + [beat] * 2) * 3
        await ward.clock.sleep(100.0)
        assert ward.answers == []
        assert "dynamo_workers_ejected_total{" not in ward.metrics.render()
        ward.answers = [answer] * 6
        await ward.clock.sleep(100.0)
        assert 'dynamo_workers_ejected_total{reason="probe"} 1\n' in ward.metrics.render()

    scene(play)


def test_an_older_worker_that_knows_no_probes_is_fit() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(2)
        ward.ill.add(next(iter(client.instances)))
        ward.error = ProtocolError("no request")
        await ward.clock.sleep(200.0)
        assert len(client.instances) == 2

    scene(play)


def test_who_may_not_be_left_out_is_not_told_as_ejected() -> None:
    async def play(ward: Ward) -> None:
        client, _ = await ward.start(1)
        (only,) = client.instances.values()
        ward.ill.add(only.id)
        await ward.ask(only, 8)
        assert "dynamo_workers_ejected_total{" not in ward.metrics.render()

    scene(play)


def test_a_closed_one_asks_nobody() -> None:
    async def play(ward: Ward) -> None:
        client, health = await ward.start(2)
        await ward.clock.sleep(25.0)
        await health.close()
        probes = ward.probes
        assert probes
        await ward.clock.sleep(100.0)
        assert ward.probes == probes
        ward.health = WorkerHealth(client, ward.clock, Random(1))

    scene(play)


def test_an_open_breaker_waits_twice_as_long_each_time_with_jitter() -> None:
    breaker, rng = Breaker(1), Random(3)
    waits = [breaker.trip(rng) for _ in range(8)]
    bounds = [min(INITIAL_OPEN_S * 2**at, MAX_OPEN_S) for at in range(8)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))


def test_requests_that_fail_of_one_cause_count_once() -> None:
    breaker = Breaker(3)
    assert not any(breaker.record_failure(0.001 * at) for at in range(50))
    assert not breaker.record_failure(1.0)
    assert breaker.record_failure(2.0)
