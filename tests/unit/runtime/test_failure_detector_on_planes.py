"""The failure detector over memory planes, with frozen, slow and leaving workers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from tests.unit.processes import Processes, play_virtually

from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.errors import WorkerDraining, WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.virtual_time import Deadlock, VirtualClock
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.calls.interruptible import Interruptible

ENDPOINT = "dynamo.worker.generate"
CONTEXT = Context(request_id="r")


class Cluster:
    """Workers that send a payload every `interval_s`, and a client that is watched."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.tasks = BackgroundTasks()
        self.processes = Processes(clock)
        self.interval_s = 0.02
        self.cancelled: list[str] = []

    async def worker(self) -> DistributedRuntime:
        runtime = await self.processes.open()

        async def handle(payload: bytes, out: ResponseWriter) -> None:
            try:
                while True:
                    await self.clock.sleep(self.interval_s)
                    out.send(b"x")
            except asyncio.CancelledError:
                self.cancelled.append(runtime.instance_id)
                raise

        await runtime.endpoint(ENDPOINT).serve(handle)
        return runtime

    async def client(self, workers: int) -> Client:
        runtime = await self.processes.open()
        client = await runtime.endpoint(ENDPOINT).client()
        await client.wait_for_instances(workers)
        FailureDetector(runtime.requests, self.clock, runtime.tasks, runtime.metrics).watch(client)
        return client

    async def call(self, client: Client, worker: DistributedRuntime, times: list[float]) -> Any:
        def sink(payload: bytes) -> bool:
            times.append(self.clock.now())
            return True

        await client.call(client.instances[worker.instance_id], b"", CONTEXT, sink)

    async def close(self) -> None:
        await self.tasks.close()
        await self.processes.close()


def freeze(runtime: DistributedRuntime) -> None:
    """Deliver nothing to the handlers of `runtime`, and nothing that they send."""
    plane: Any = runtime.requests
    plane.network.sever()


run_scenario = partial(play_virtually, Cluster)


def test_calls_of_a_frozen_worker_fail_in_time() -> None:
    async def play(cluster: Cluster) -> None:
        worker, other = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        call = cluster.tasks.start(cluster.call(client, worker, []))
        await cluster.clock.sleep(1.0)
        freeze(worker)
        frozen_at = cluster.clock.now()
        with pytest.raises(WorkerFailed, match="does not answer"):
            await call
        assert cluster.clock.now() - frozen_at < 1.4
        assert client.instances.keys() == {other.instance_id}

    run_scenario(play)


def test_a_call_without_a_payload_yet_fails_in_time_too() -> None:
    async def play(cluster: Cluster) -> None:
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        freeze(worker)
        with pytest.raises(WorkerFailed, match="does not answer"):
            await cluster.call(client, worker, [])
        assert cluster.clock.now() < 1.4

    run_scenario(play)


def test_a_worker_that_answers_directly_is_bypassed_and_not_declared_failed() -> None:
    async def play(cluster: Cluster) -> None:
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        plane: Any = client._requests
        bypassed: list[str] = []

        async def probe_directly(address: str, endpoint: str) -> bool:
            return address == worker.requests.address

        def bypass(address: str) -> None:
            bypassed.append(address)
            plane.disconnect(address)

        plane.probe_directly, plane.bypass = probe_directly, bypass
        call = cluster.tasks.start(cluster.call(client, worker, []))
        await cluster.clock.sleep(0.01)
        freeze(worker)
        with pytest.raises(WorkerFailed):
            await call
        assert cluster.clock.now() < 1.4
        assert bypassed == [worker.requests.address]

    run_scenario(play)


def test_a_slow_worker_that_answers_pings_is_left_alone() -> None:
    async def play(cluster: Cluster) -> None:
        cluster.interval_s = 60.0
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        times: list[float] = []
        cluster.tasks.start(cluster.call(client, worker, times))
        await cluster.clock.sleep(150.0)
        assert len(times) == 2
        assert len(client.instances) == 2

    run_scenario(play)


def test_the_last_worker_is_never_declared_failed() -> None:
    async def play(cluster: Cluster) -> None:
        worker = await cluster.worker()
        client = await cluster.client(1)
        call = cluster.tasks.start(cluster.call(client, worker, []))
        await cluster.clock.sleep(0.01)
        freeze(worker)
        await cluster.clock.sleep(30.0)
        assert not call.done()
        assert len(client.instances) == 1

    run_scenario(play)


def test_requests_of_a_worker_that_leaves_move_at_once() -> None:
    async def play(cluster: Cluster) -> None:
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        call = cluster.tasks.start(cluster.call(client, worker, []))
        await cluster.clock.sleep(1.0)
        draining_since = cluster.clock.now()
        await worker.shutdown(30.0)
        with pytest.raises(WorkerDraining):
            await call
        assert cluster.clock.now() - draining_since < 1.0
        assert cluster.cancelled == [worker.instance_id]

    run_scenario(play)


def test_requests_of_the_last_worker_stay_until_its_drain_ends() -> None:
    async def play(cluster: Cluster) -> None:
        worker = await cluster.worker()
        client = await cluster.client(1)
        call = cluster.tasks.start(cluster.call(client, worker, []))
        await cluster.clock.sleep(1.0)
        draining_since = cluster.clock.now()
        await worker.shutdown(5.0)
        with pytest.raises(WorkerFailed, match="stopped before"):
            await call
        assert cluster.clock.now() - draining_since >= 5.0

    run_scenario(play)


def test_an_idle_detector_sets_no_timer() -> None:
    async def play(cluster: Cluster) -> None:
        await cluster.worker()
        await cluster.client(1)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_scenario(play)


async def test_an_interrupted_call_raises_the_error_of_the_interrupt() -> None:
    calls: dict[Interruptible, None] = {}

    async def wait() -> None:
        with Interruptible(calls):
            await asyncio.Event().wait()

    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        task = tasks.start(wait())
        await asyncio.sleep(0)
        next(iter(calls)).interrupt(WorkerFailed("gone"))
        with pytest.raises(WorkerFailed, match="gone"):
            await task
        assert not calls


async def test_a_cancelled_call_stays_cancelled() -> None:
    calls: dict[Interruptible, None] = {}

    async def wait() -> None:
        with Interruptible(calls):
            await asyncio.Event().wait()

    async with BackgroundTasks() as tasks:
        task = tasks.start(wait())
        await asyncio.sleep(0)
        next(iter(calls)).interrupt(WorkerFailed("gone"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
