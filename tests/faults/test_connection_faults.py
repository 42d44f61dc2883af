"""Broken, silent, slow and half-open connections between a frontend and workers behind relays.

All run in one process over real TCP. Answers must be complete and the same as without faults.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from tests.faults.lossy_relay import LossyRelay, RelayedRequests
from tests.support.relay import ConnectionEnd
from tests.unit.processes import send_through

from dynamo.communication.requests import ResponseWriter, client_connection
from dynamo.core.clock import SystemClock
from dynamo.core.codec import ReplyEncoder, decode_request, pack_ids
from dynamo.core.context import Context
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings as EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.probe import answer_probe, encode_probe_result
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.scheduling.worker_health import WorkerHealth
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.testing.fakes import CollectedReply

ENDPOINT = "dynamo.worker.generate"
TOKENS = tuple(range(10, 200))
_names = itertools.count()


class JumpingClock(SystemClock):
    """A clock whose wall time can be shifted."""

    offset_s = 0.0

    def wall(self) -> float:  # type: ignore[override]
        return super().wall() + self.offset_s


class RelayedWorkers:
    """A frontend, and workers with a relay in front of each."""

    def __init__(self, clock: SystemClock) -> None:
        self.clock = clock
        self.relays: list[LossyRelay] = []
        self.engines: list[Any] = []
        self.stack = AsyncExitStack()
        discovery = f"memory:wires-{next(_names)}"
        settings = Settings()
        planes = replace(settings.runtime, discovery=discovery, events="memory:")
        self.settings = replace(settings, runtime=planes)

    async def runtime(self) -> DistributedRuntime:
        runtime = await DistributedRuntime.create(self.settings, clock=self.clock)
        self.stack.push_async_callback(runtime.shutdown, 0.0)
        return runtime

    async def worker(self) -> None:
        relay = await self.stack.enter_async_context(LossyRelay())
        runtime = await self.runtime()
        runtime.requests = RelayedRequests(runtime.requests, relay)  # type: ignore[assignment]
        timing = EngineSettings(kind="mock", timing="constant:0.01,10")
        engine: Engine = make_mock_engine(timing, TOKENS, self.clock, context_tokens=4096)
        await engine.start()
        self.stack.push_async_callback(engine.stop)

        async def generate(payload: bytes, writer: ResponseWriter) -> None:
            if not payload:
                writer.send(encode_probe_result(await answer_probe(engine)))
                return
            reply = ReplyEncoder(writer.send, runtime.instance_id)
            writer.is_alive = partial(engine.has_request, reply)
            await engine.generate(decode_request(payload), writer.context, reply)

        await runtime.endpoint(ENDPOINT).serve(generate)
        self.relays.append(relay)
        self.engines.append(engine)

    async def frontend(self) -> None:
        runtime = await self.runtime()
        self.metrics = runtime.metrics
        self.client = await runtime.endpoint(ENDPOINT).client()
        await self.client.wait_for_instances(len(self.relays))
        FailureDetector(runtime.requests, self.clock, runtime.tasks, runtime.metrics).watch(
            self.client
        )
        ledger = Ledger(self.clock, self.client)
        self.health = WorkerHealth(self.client, ledger, self.clock, Random(1), runtime.metrics)
        self.stack.push_async_callback(self.health.close)
        self.send = send_through(
            self.client, "round_robin", runtime.metrics, clock=self.clock, ledger=ledger
        )

    async def ask(self, key: int, tokens: int) -> CollectedReply:
        reply = CollectedReply()
        request = GenerateRequest(
            f"r{key}",
            "m",
            pack_ids([11, 12, key]),
            SamplingParams(temperature=0),
            StopConditions(tokens),
        )
        await self.send(request, Context(request_id=request.request_id), reply)
        return reply

    async def ask_all(self, tokens: int, count: int = 12) -> dict[int, list[int]]:
        async with asyncio.TaskGroup() as group:
            tasks = {key: group.create_task(self.ask(key, tokens)) for key in range(count)}
        for task in tasks.values():
            end = task.result().end
            assert end is not None
            assert (end.reason, end.completion_tokens) == ("length", tokens)
        return {key: task.result().ids for key, task in tasks.items()}

    async def until_busy(self) -> None:
        """Wait until every engine runs a request."""
        while not all(engine.report_load().running for engine in self.engines):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)

    @asynccontextmanager
    async def unaffected_streams(self, tokens: int = 60) -> AsyncIterator[dict[int, list[int]]]:
        """Assert that concurrent answers during the block are the same as before it."""
        before = await self.ask_all(tokens)
        async with BackgroundTasks() as tasks:
            answers = tasks.start(self.ask_all(tokens))
            await self.until_busy()
            yield before
            assert await answers == before


@asynccontextmanager
async def start_workers(
    workers: int = 3, clock: SystemClock | None = None
) -> AsyncIterator[RelayedWorkers]:
    deployment = RelayedWorkers(clock or SystemClock())
    async with deployment.stack:
        for _ in range(workers):
            await deployment.worker()
        await deployment.frontend()
        yield deployment


@pytest.mark.parametrize("end", get_args(ConnectionEnd))
async def test_a_connection_ends_during_streams(end: ConnectionEnd) -> None:
    async with start_workers() as deployment:
        async with deployment.unaffected_streams():
            deployment.relays[0].end_connections(end)
        await deployment.client.wait_for_instances(3, 10)


async def test_all_connections_aborted_at_once() -> None:
    async with start_workers() as deployment, deployment.unaffected_streams():
        for relay in deployment.relays:
            relay.abort_connections()


async def test_a_partition_that_heals() -> None:
    """No byte passes and no connection closes. Late items of moved streams are dropped."""
    async with start_workers() as deployment:
        async with deployment.unaffected_streams() as before:
            deployment.relays[0].silent = True
        assert len(deployment.client.instances) == 2
        deployment.relays[0].silent = False
        await deployment.client.wait_for_instances(3, 10)
        assert await deployment.ask_all(60) == before


async def test_a_half_open_connection_is_replaced() -> None:
    """The network drops one connection silently. New connections to the worker succeed."""
    async with start_workers() as deployment:
        async with deployment.unaffected_streams():
            deployment.relays[0].blackhole_connections()
        await deployment.client.wait_for_instances(3, 10)
        assert deployment.relays[0].connection_count == 2


async def test_a_slow_path_is_not_a_frozen_worker() -> None:
    async with start_workers() as deployment:
        before = await deployment.ask_all(60)
        deployment.relays[0].delay_s = 0.25
        assert await deployment.ask_all(60) == before
        assert "dynamo_workers_frozen_total 0" in deployment.metrics.render()
        assert len(deployment.client.instances) == 3


async def test_a_lost_stream_is_migrated_while_its_connection_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker reports that the lost stream has ended, and the stream is migrated."""
    monkeypatch.setattr(client_connection, "SILENCE_QUERY_S", 0.1)
    async with start_workers() as deployment:
        async with deployment.unaffected_streams():
            (loss,) = deployment.relays[0].losses
            loss.on = True
        assert loss.lost > 1
        assert 'dynamo_migrations_total{reason="worker_failed"} 1' in deployment.metrics.render()
        assert len(deployment.client.instances) == 3


async def test_a_request_lost_by_its_engine_is_migrated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_connection, "SILENCE_QUERY_S", 0.1)
    async with start_workers() as deployment:
        async with deployment.unaffected_streams():
            deployment.engines[0].scheduler.running.pop()
        assert 'dynamo_migrations_total{reason="worker_failed"} 1' in deployment.metrics.render()
        assert len(deployment.client.instances) == 3
        assert not any(engine.report_load().active_blocks for engine in deployment.engines)


async def test_slow_and_queued_streams_survive_silence_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_connection, "SILENCE_QUERY_S", 0.002)
    async with start_workers() as deployment:
        before = await deployment.ask_all(30)
        deployment.relays[0].delay_s = 0.1
        assert await deployment.ask_all(30) == before
        assert 'dynamo_migrations_total{reason="worker_failed"} 0' in deployment.metrics.render()


async def test_the_wall_clock_jumps() -> None:
    clock = JumpingClock()
    async with start_workers(clock=clock) as deployment:
        for offset_s in (3600.0, -3600.0):
            async with deployment.unaffected_streams(40):
                clock.offset_s = offset_s
        assert len(deployment.client.instances) == 3
