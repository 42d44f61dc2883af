"""Prompts that one native engine computes for another: the tokens are those of a single engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.invariants import check_pool
from tests.unit.inference.conftest import RecordingReply

from dynamo.communication.transfer import RegionPeer
from dynamo.communication.transfer.memory import MemoryTransfer
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.tasks import run_all
from dynamo.core.values import GenerateRequest, SamplingParams
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill, PrefillPeer
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.kv_source import PrefillSink

rng = np.random.default_rng(3)
PROMPTS = [rng.integers(0, 320, size).tolist() for size in (1, 4, 5, 23, 40, 64, 9)]
SEEDED = SamplingParams(
    temperature=1.0, top_p=0.95, top_k=50, seed=9, frequency_penalty=0.4, repetition_penalty=1.2
)
GREEDY = SamplingParams(temperature=0.0)


class EnginePeer(PrefillPeer):
    """Another engine of this process."""

    def __init__(self, engine: BatchedEngine, region: RegionPeer) -> None:
        self._engine = engine
        self._region = region
        self.prompts = 0

    async def connect(self, rank: int) -> RegionPeer:
        return self._region

    def limit_s(self, tokens: int) -> float:
        return 100.0  # a busy machine fails no prompt

    async def prefill(
        self,
        rank: int,
        request: GenerateRequest,
        context: Context,
        have_blocks: int,
        sink: PrefillSink,
    ) -> None:
        self.prompts += 1
        await self._engine.prefill(request, context, have_blocks, sink)


class NativePair:
    """Engine `p` computes prompts for engine `d`."""

    def __init__(self, p: BatchedEngine, d: BatchedEngine) -> None:
        self.p, self.d = p, d

    async def start(self) -> None:
        clock, layouts = SystemClock(), []
        planes = {}
        for engine in (self.p, self.d):
            await engine.start()
            assert engine.runner.region is not None
            planes[engine] = plane = MemoryTransfer(clock)
            layouts.append(await plane.expose(engine.runner.region, engine.runner.layout))
        self.peer = EnginePeer(self.p, await planes[self.d].connect(layouts[0]))
        self.d.kv_source = PeerPrefill(self._find, clock)

    async def _find(self, instance_id: str) -> PrefillPeer | None:
        return {"p": self.peer}.get(instance_id)

    async def answer(self, engine: BatchedEngine, request: GenerateRequest) -> RecordingReply:
        reply = RecordingReply()
        await engine.generate(request, Context("r"), reply)
        return reply

    def check_idle(self) -> None:
        for engine in (self.p, self.d):
            load = engine.report_load()
            assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)
            check_pool(engine.scheduler.pool)


@pytest.fixture
async def pair(make_engine: Any) -> AsyncIterator[NativePair]:
    pair = NativePair(make_engine(max_num_batched_tokens=16), make_engine())
    await pair.start()
    yield pair
    await asyncio.sleep(0)
    pair.check_idle()
    await pair.p.stop()
    await pair.d.stop()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_the_answers_are_those_of_one_engine(
    pair: NativePair, make_engine: Any, make_request: Any, sampling: SamplingParams
) -> None:
    alone = make_engine()
    await alone.start()
    requests = [make_request(prompt, 10, sampling=sampling) for prompt in PROMPTS]
    expected = await run_all(*(pair.answer(alone, request) for request in requests))
    remote = [replace(request, prefill="p") for request in requests]
    for _ in range(2):
        replies = await run_all(*(pair.answer(pair.d, request) for request in remote))
        assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    counters = pair.d.arrivals.counters
    assert not counters.fallbacks
    assert counters.blocks_arrived > 40
    await alone.stop()


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({"prefix_caching": False}, {}),
        ({}, {"prefix_caching": False, "max_num_seqs": 2}),
        ({"num_blocks": 30, "max_num_batched_tokens": 7}, {"num_blocks": 22}),
        ({"block_size": 8}, {}),
        ({"block_size": 4, "max_num_batched_tokens": 7}, {"block_size": 8}),
    ],
    ids=str,
)
async def test_engines_of_other_sizes_give_the_same_tokens(
    make_engine: Any, make_request: Any, p: dict[str, Any], d: dict[str, Any]
) -> None:
    pair = NativePair(make_engine(**p), make_engine(**d))
    await pair.start()
    requests = [make_request(prompt, 10, sampling=SEEDED) for prompt in PROMPTS]
    expected = await run_all(*(pair.answer(pair.p, request) for request in requests))
    remote = [replace(request, prefill="p") for request in requests]
    for _ in range(2):  # the second time from the cache
        replies = await run_all(*(pair.answer(pair.d, request) for request in remote))
        assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    assert pair.d.arrivals.counters.blocks_arrived
    assert not pair.d.arrivals.counters.fallbacks
    await asyncio.sleep(0)
    pair.check_idle()
    await pair.p.stop()
    await pair.d.stop()
