"""Worker health in virtual time: ejection, re-admission, and the half that always stays."""

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
    MalformedAnswer,
    NoWorkers,
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
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.testing.fakes import CollectedReply

ENDPOINT = "dynamo.worker.generate"
REQUEST = GenerateRequest("r", "m", b"\0\0\0\0", SamplingParams(), StopConditions())
CONTEXT = Context(request_id="r")


class SingleWorkerPolicy(Policy):
    """Chooses one instance."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        if self.instance.id in tried:
            raise NoWorkers("the only worker was tried")
        return Decision(self.instance, "single", 1)


class HealthScene:
    """Workers, a client, and its WorkerHealth.

    Workers answer a probe with the next of `answers`, else with `steps` and `requests`. Calls with
    a payload are never answered. Workers in `failing` raise `error`.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.processes = Processes(clock)
        self.failing: set[str] = set()
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
        self.ledger = Ledger(self.clock, client)
        self.health = WorkerHealth(client, self.ledger, self.clock, Random(1), runtime.metrics)
        self.health.start()
        return client, self.health

    async def worker(self) -> None:
        runtime = await self.processes.open()

        async def handle(payload: bytes, out: ResponseWriter) -> None:
            self.probes += 1
            if runtime.instance_id in self.failing:
                raise self.error
            if payload:
                await asyncio.Event().wait()
            result = [msgspec.msgpack.encode(ProbeResult(self.steps, self.requests))]
            for item in self.answers.pop(0) if self.answers else result:
                out.send(item)

        await runtime.endpoint(ENDPOINT).serve(handle)

    async def answer(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        if instance.id in self.failing:
            raise self.error

    async def send(self, instance: Instance, times: int = 1) -> None:
        for _ in range(times):
            await self.clock.sleep(1.0)
            policy = SingleWorkerPolicy(instance)
            router = WorkerRouter(policy, self.answer, clock=self.clock, ledger=self.ledger)
            with contextlib.suppress(DynamoError):
                await router.send(REQUEST, CONTEXT, CollectedReply())

    async def close(self) -> None:
        await self.calls.close()
        await self.health.close()
        await self.processes.close()


run_scenario = partial(play_virtually, HealthScene)


def ejections(scene: HealthScene) -> float:
    """Return how many workers were ejected, for any reason."""
    lines = scene.metrics.render().splitlines()
    name = "dynamo_workers_ejected_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_failures_of_a_prefill_worker_do_not_eject_the_decode_worker() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(3)
        decode_worker = next(iter(client.instances.values()))
        scene.failing.add(decode_worker.id)
        scene.error = WorkerFailed("prefill worker p failed")
        scene.error.instance = "p"
        await scene.send(decode_worker, 5)
        assert decode_worker.id in client.instances

    run_scenario(play)


def test_three_failures_eject_and_a_probe_readmits() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(3)
        bad = next(iter(client.instances.values()))
        scene.failing.add(bad.id)
        await scene.send(bad, 2)
        assert bad.id in client.instances
        await scene.send(bad)
        assert bad.id not in client.instances
        await scene.clock.sleep(20.0)
        assert bad.id not in client.instances
        scene.failing.clear()
        await scene.clock.sleep(MAX_OPEN_S)
        assert bad.id in client.instances

    run_scenario(play)


def test_a_success_resets_the_failures() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(3)
        worker = next(iter(client.instances.values()))
        for _ in range(5):
            scene.failing.add(worker.id)
            await scene.send(worker, 2)
            scene.failing.clear()
            await scene.send(worker)
        assert worker.id in client.instances

    run_scenario(play)


def test_a_half_open_breaker_trips_at_one_failure() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(3)
        bad = next(iter(client.instances.values()))
        scene.failing.add(bad.id)
        await scene.send(bad, 3)
        scene.failing.clear()
        await scene.clock.sleep(2.0)
        assert bad.id in client.instances
        scene.failing.add(bad.id)
        await scene.send(bad)
        assert bad.id not in client.instances

    run_scenario(play)


@pytest.mark.parametrize(("workers", "left"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_at_most_half_of_the_workers_are_ejected(workers: int, left: int) -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(workers)
        workers_before = list(client.instances.values())
        scene.failing.update(worker.id for worker in workers_before)
        for worker in workers_before:
            await scene.send(worker, 4)
        assert len(client.instances) == left

    run_scenario(play)


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("no"), WorkerDraining("bye"), NoWorkers("none"), MalformedAnswer("odd")],
)
def test_errors_that_are_not_the_workers_fault_do_not_count(error: DynamoError) -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(2)
        worker = next(iter(client.instances.values()))
        scene.failing.add(worker.id)
        scene.error = error
        await scene.send(worker, 5)
        assert worker.id in client.instances

    run_scenario(play)


def test_the_third_missed_probe_ejects() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(2)
        bad = next(iter(client.instances))
        scene.failing.add(bad)
        await scene.clock.sleep(25.0)
        assert bad in client.instances
        await scene.clock.sleep(10.0)
        assert bad not in client.instances
        assert scene.probes >= 6

    run_scenario(play)


def test_an_engine_with_requests_and_no_steps_is_stuck() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(2)
        scene.requests, scene.steps = 1, 7
        await scene.clock.sleep(ENGINE_STALL_S - 5.0)
        assert len(client.instances) == 2
        await scene.clock.sleep(40.0)
        assert len(client.instances) == 1
        scene.steps = 8
        await scene.clock.sleep(2 * MAX_OPEN_S)
        assert len(client.instances) == 2

    run_scenario(play)


def test_a_slow_engine_with_steps_is_healthy() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(2)
        scene.requests = 50
        for _ in range(20):
            scene.steps += 1
            await scene.clock.sleep(30.0)
            assert len(client.instances) == 2

    run_scenario(play)


def test_requests_of_a_stuck_engine_are_interrupted() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(2)
        scene.requests, scene.steps = 1, 7
        calls = [
            scene.calls.start(client.call(worker, b"x", CONTEXT, lambda _: True))
            for worker in client.instances.values()
        ]
        await scene.clock.sleep(ENGINE_STALL_S - 10.0)
        assert not any(call.done() for call in calls)
        await scene.clock.sleep(45.0)
        for call in calls:
            with pytest.raises(WorkerFailed, match="is stuck"):
                await call

    run_scenario(play)


def test_a_long_idle_engine_is_not_stuck_at_its_first_request() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(2)
        await scene.clock.sleep(10 * ENGINE_STALL_S)
        scene.requests = 1
        await scene.clock.sleep(ENGINE_STALL_S - 15.0)
        assert len(client.instances) == 2

    run_scenario(play)


@pytest.mark.parametrize("answer", [[], [b"no result"]], ids=["nothing", "unreadable"])
def test_an_unreadable_probe_counts_as_missed_until_a_good_one(answer: list[bytes]) -> None:
    async def play(scene: HealthScene) -> None:
        await scene.start(2)
        result = [msgspec.msgpack.encode(ProbeResult())]
        scene.answers = ([answer] * 4 + [result] * 2) * 3
        await scene.clock.sleep(100.0)
        assert scene.answers == []
        assert ejections(scene) == 0
        scene.answers = [answer] * 6
        await scene.clock.sleep(100.0)
        assert 'dynamo_workers_ejected_total{reason="probe"} 1\n' in scene.metrics.render()

    run_scenario(play)


def test_a_worker_that_must_stay_is_not_counted_as_ejected() -> None:
    async def play(scene: HealthScene) -> None:
        client, _ = await scene.start(1)
        (only,) = client.instances.values()
        scene.failing.add(only.id)
        await scene.send(only, 8)
        assert ejections(scene) == 0

    run_scenario(play)


def test_close_stops_the_probes() -> None:
    async def play(scene: HealthScene) -> None:
        client, health = await scene.start(2)
        await scene.clock.sleep(25.0)
        await health.close()
        probes = scene.probes
        assert probes
        await scene.clock.sleep(100.0)
        assert scene.probes == probes
        scene.health = WorkerHealth(client, Ledger(scene.clock), scene.clock, Random(1))

    run_scenario(play)


def test_an_open_breaker_waits_twice_as_long_each_time_with_jitter() -> None:
    breaker, rng = Breaker(1), Random(3)
    waits = [breaker.trip(rng) for _ in range(8)]
    bounds = [min(INITIAL_OPEN_S * 2**at, MAX_OPEN_S) for at in range(8)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))


def test_simultaneous_failures_count_once() -> None:
    breaker = Breaker(3)
    assert not any(breaker.record_failure(0.001 * at) for at in range(50))
    assert not breaker.record_failure(1.0)
    assert breaker.record_failure(2.0)


def test_a_request_that_ends_after_its_worker_is_gone_leaves_nothing() -> None:
    async def play(scene: HealthScene) -> None:
        _, health = await scene.start(1)
        gone = Instance("gone", "memory://gone", "n", "c", "e")
        await scene.send(gone)
        assert "gone" not in health._workers

    run_scenario(play)
