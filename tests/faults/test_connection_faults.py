"""Connections that are cut, fall silent, are slow or half open: workers on real TCP behind relays,
a frontend's pipeline before them, all in one process. Answers must be whole and the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.faults.relay import LossyRelay, Relayed
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
from dynamo.testing.fakes import CollectedReply

ENDPOINT = "dynamo.worker.generate"
WORDS = tuple(range(10, 200))
_places = itertools.count()


class WallJumps(SystemClock):
    """Whose wall clock somebody sets."""

    offset_s = 0.0

    def wall(self) -> float:  # type: ignore[override]
        return super().wall() + self.offset_s


class Wires:
    """`relays`: one before each worker."""

    def __init__(self, clock: SystemClock) -> None:
        self.clock = clock
        self.relays: list[LossyRelay] = []
        self.engines: list[Any] = []
        self.held = AsyncExitStack()
        place = f"memory:wires-{next(_places)}"
        settings = Settings()
        planes = replace(settings.runtime, discovery=place, events="memory:")
        self.settings = replace(settings, runtime=planes)

    async def runtime(self) -> DistributedRuntime:
        runtime = await DistributedRuntime.create(self.settings, clock=self.clock)
        self.held.push_async_callback(runtime.shutdown, 0.0)
        return runtime

    async def worker(self) -> None:
        relay = await self.held.enter_async_context(LossyRelay())
        runtime = await self.runtime()
        runtime.requests = Relayed(runtime.requests, relay)  # type: ignore[assignment]
        timing = EngineSettings(kind="mock", timing="constant:0.01,10")
        engine: Engine = make_mock_engine(timing, WORDS, self.clock, context_tokens=4096)
        await engine.start()
        self.held.push_async_callback(engine.stop)

        async def generate(payload: bytes, out: ResponseWriter) -> None:
            if not payload:
                out.send(encode_probe_result(await answer_probe(engine)))
                return
            reply = ReplyEncoder(out.send, runtime.instance_id)
            out.is_alive = partial(engine.has_request, reply)
            await engine.generate(decode_request(payload), out.context, reply)

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
        self.health = WorkerHealth(self.client, self.clock, Random(1), runtime.metrics)
        self.held.push_async_callback(self.health.close)
        self.send = send_through(
            self.client, "round_robin", runtime.metrics, clock=self.clock, health=self.health
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

    async def crowd(self, tokens: int, count: int = 12) -> dict[int, list[int]]:
        async with asyncio.TaskGroup() as group:
            asked = {key: group.create_task(self.ask(key, tokens)) for key in range(count)}
        for one in asked.values():
            end = one.result().end
            assert end is not None
            assert (end.reason, end.completion_tokens) == ("length", tokens)
        return {key: one.result().ids for key, one in asked.items()}

    async def until_busy(self) -> None:
        """Every engine computes."""
        while not all(engine.load().running for engine in self.engines):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)

    @asynccontextmanager
    async def crowded(self, tokens: int = 60) -> AsyncIterator[dict[int, list[int]]]:
        """A crowd is answered the same as before, whatever happens within."""
        before = await self.crowd(tokens)
        async with BackgroundTasks() as tasks:
            asked = tasks.start(self.crowd(tokens))
            await self.until_busy()
            yield before
            assert await asked == before


@asynccontextmanager
async def wires(workers: int = 3, clock: SystemClock | None = None) -> AsyncIterator[Wires]:
    made = Wires(clock or SystemClock())
    async with made.held:
        for _ in range(workers):
            await made.worker()
        await made.frontend()
        yield made


async def test_a_connection_cut_midway() -> None:
    async with wires() as made:
        async with made.crowded():
            made.relays[0].abort_connections()
        await made.client.wait_for_instances(3, 10)


async def test_every_connection_cut_at_once() -> None:
    async with wires() as made, made.crowded():
        for relay in made.relays:
            relay.abort_connections()


async def test_a_partition_that_heals() -> None:
    """Nothing passes and nothing is closed; what is late afterwards finds nobody."""
    async with wires() as made:
        async with made.crowded() as before:
            made.relays[0].silent = True
        assert len(made.client.instances) == 2
        made.relays[0].silent = False
        await made.client.wait_for_instances(3, 10)
        assert await made.crowd(60) == before


async def test_a_half_open_connection_is_dialled_anew() -> None:
    """The path has forgotten the connection; the worker is well."""
    async with wires() as made:
        async with made.crowded():
            made.relays[0].blackhole_connections()
        await made.client.wait_for_instances(3, 10)
        assert made.relays[0].connection_count == 2


async def test_a_slow_path_is_no_frozen_worker() -> None:
    async with wires() as made:
        before = await made.crowd(60)
        made.relays[0].delay_s = 0.25
        assert await made.crowd(60) == before
        assert "dynamo_workers_frozen_total 0" in made.metrics.render()
        assert len(made.client.instances) == 3


async def test_one_stream_is_lost_while_its_worker_and_connection_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker, asked, knows nothing of it once it has ended there: it goes on elsewhere."""
    monkeypatch.setattr(client_connection, "SILENCE_QUERY_S", 0.1)
    async with wires() as made:
        async with made.crowded():
            (loss,) = made.relays[0].losses
            loss.on = True
        assert loss.lost > 1
        assert 'dynamo_migrations_total{reason="worker_failed"} 1' in made.metrics.render()
        assert len(made.client.instances) == 3


async def test_a_request_that_its_engine_forgot_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_connection, "SILENCE_QUERY_S", 0.1)
    async with wires() as made:
        async with made.crowded():
            made.engines[0].scheduler.running.pop()
        assert 'dynamo_migrations_total{reason="worker_failed"} 1' in made.metrics.render()
        assert len(made.client.instances) == 3
        assert not any(engine.load().active_blocks for engine in made.engines)


async def test_who_waits_or_is_slow_is_asked_after_and_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_connection, "SILENCE_QUERY_S", 0.002)
    async with wires() as made:
        before = await made.crowd(30)
        made.relays[0].delay_s = 0.1
        assert await made.crowd(30) == before
        assert "dynamo_migrations_total{" not in made.metrics.render()


async def test_the_wall_clock_jumps() -> None:
    clock = WallJumps()
    async with wires(clock=clock) as made:
        for offset_s in (3600.0, -3600.0):
            async with made.crowded(40):
                clock.offset_s = offset_s
        assert len(made.client.instances) == 3
