"""Who is frozen and who is merely silent, on virtual time."""

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
    """Workers that say `say` every `pace_s`, and a client that is watched."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.tasks = BackgroundTasks()
        self.processes = Processes(clock)
        self.pace_s = 0.02
        self.left: list[str] = []

    async def worker(self) -> DistributedRuntime:
        runtime = await self.processes.open()

        async def handle(payload: bytes, out: ResponseWriter) -> None:
            try:
                while True:
                    await self.clock.sleep(self.pace_s)
                    out.send(b"x")
            except asyncio.CancelledError:
                self.left.append(runtime.instance_id)
                raise

        await runtime.endpoint(ENDPOINT).serve(handle)
        return runtime

    async def client(self, workers: int) -> Client:
        runtime = await self.processes.open()
        client = await runtime.endpoint(ENDPOINT).client()
        await client.wait_for_instances(workers)
        FailureDetector(runtime.requests, self.clock, runtime.tasks).watch(client)
        return client

    async def call(self, client: Client, worker: DistributedRuntime, heard: list[float]) -> Any:
        def sink(payload: bytes) -> bool:
            heard.append(self.clock.now())
            return True

        await client.call(client.instances[worker.instance_id], b"", CONTEXT, sink)

    async def close(self) -> None:
        await self.tasks.close()
        await self.processes.close()


def freeze(runtime: DistributedRuntime) -> None:
    """Nothing that reaches it is answered any more, and what it says does not get out."""
    plane: Any = runtime.requests
    plane.endpoints.start = lambda *_: None
    for wire in plane.accepted:
        wire._outbox.arm = lambda: None


scene = partial(play_virtually, Cluster)


def test_what_a_frozen_worker_had_fails_in_time() -> None:
    async def play(cluster: Cluster) -> None:
        worker, other = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        heard: list[float] = []
        call = cluster.tasks.start(cluster.call(client, worker, heard))
        await cluster.clock.sleep(1.0)
        freeze(worker)
        frozen = cluster.clock.now()
        with pytest.raises(WorkerFailed, match="does not answer"):
            await call
        assert cluster.clock.now() - frozen < 1.4
        assert client.instances.keys() == {other.instance_id}

    scene(play)


def test_before_the_first_token_too() -> None:
    async def play(cluster: Cluster) -> None:
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        freeze(worker)
        with pytest.raises(WorkerFailed, match="does not answer"):
            await cluster.call(client, worker, [])
        assert cluster.clock.now() < 1.4

    scene(play)


def test_who_answers_beside_the_server_is_called_that_way_and_not_given_up() -> None:
    async def play(cluster: Cluster) -> None:
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        plane: Any = client._requests
        bypassed: list[str] = []

        async def answers_beside(address: str, endpoint: str) -> bool:
            return address == worker.requests.address

        def bypass(address: str) -> None:
            bypassed.append(address)
            plane.break_off(address)

        plane.answers_beside, plane.bypass = answers_beside, bypass
        freeze(worker)
        with pytest.raises(WorkerFailed):
            await cluster.call(client, worker, [])
        assert cluster.clock.now() < 1.4
        assert bypassed == [worker.requests.address]

    scene(play)


def test_a_slow_worker_that_answers_questions_is_left_alone() -> None:
    async def play(cluster: Cluster) -> None:
        cluster.pace_s = 60.0
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        heard: list[float] = []
        cluster.tasks.start(cluster.call(client, worker, heard))
        await cluster.clock.sleep(150.0)
        assert len(heard) == 2
        assert len(client.instances) == 2

    scene(play)


def test_the_last_one_is_never_given_up() -> None:
    async def play(cluster: Cluster) -> None:
        worker = await cluster.worker()
        client = await cluster.client(1)
        call = cluster.tasks.start(cluster.call(client, worker, []))
        freeze(worker)
        await cluster.clock.sleep(30.0)
        assert not call.done()
        assert len(client.instances) == 1

    scene(play)


def test_requests_of_a_worker_that_leaves_move_at_once() -> None:
    async def play(cluster: Cluster) -> None:
        worker, _ = await cluster.worker(), await cluster.worker()
        client = await cluster.client(2)
        call = cluster.tasks.start(cluster.call(client, worker, []))
        await cluster.clock.sleep(1.0)
        began = cluster.clock.now()
        await worker.shutdown(30.0)
        with pytest.raises(WorkerDraining):
            await call
        assert cluster.clock.now() - began < 1.0
        assert cluster.left == [worker.instance_id]

    scene(play)


def test_but_the_last_one_finishes_what_it_has() -> None:
    async def play(cluster: Cluster) -> None:
        worker = await cluster.worker()
        client = await cluster.client(1)
        call = cluster.tasks.start(cluster.call(client, worker, []))
        await cluster.clock.sleep(1.0)
        began = cluster.clock.now()
        await worker.shutdown(5.0)
        with pytest.raises(WorkerFailed, match="stopped before"):
            await call
        assert cluster.clock.now() - began >= 5.0

    scene(play)


def test_idle_it_sets_no_timer() -> None:
    async def play(cluster: Cluster) -> None:
        await cluster.worker()
        await cluster.client(1)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        scene(play)


async def test_an_interrupted_call_raises_what_it_was_given() -> None:
    calls: set[Interruptible] = set()

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
    calls: set[Interruptible] = set()

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
