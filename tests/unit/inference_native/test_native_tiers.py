"""Tiers below a native engine with few blocks: the tokens are those of an engine without tiers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.support.invariants import check_pool, check_slots
from tests.support.token_time import KnownTokenTime
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import GenerateRequest, SamplingParams
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.opening import plan_host_blocks

rng = np.random.default_rng(5)
PREFIXES = [rng.integers(0, 320, 60).tolist() for _ in range(4)]
PROMPTS = [prefix + rng.integers(0, 320, 9).tolist() for _ in range(3) for prefix in PREFIXES]
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=9, frequency_penalty=0.4)
GREEDY = SamplingParams(temperature=0.0)
BLOCK_BYTES = 4 * 2 * 2 * 2 * 8 * 4
"""4 tokens, 2 layers, keys and values, 2 heads of 8 floats."""


async def answer(engine: BatchedEngine, request: GenerateRequest) -> list[int]:
    reply = RecordingReply()
    await engine.generate(request, Context("r"), reply)
    while engine.tiers.storing:
        await asyncio.sleep(0.001)
    return reply.ids


def check_idle(engine: BatchedEngine) -> None:
    load = engine.report_load()
    assert (load.running, load.waiting, load.arriving, load.active_blocks) == (0, 0, 0, 0)
    check_pool(engine.scheduler.pool)
    for tier in engine.tiers.tiers:
        if isinstance(tier, MemoryTier):
            check_slots(tier.slots)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_the_answers_are_those_without_tiers(
    make_engine: Any, make_request: Any, sampling: SamplingParams
) -> None:
    requests = [make_request(prompt, 10, sampling=sampling) for prompt in PROMPTS]
    alone = make_engine()
    await alone.start()
    expected = [await answer(alone, request) for request in requests]
    await alone.stop()

    engine = make_engine(CacheSettings(cpu_size=200 * BLOCK_BYTES), num_blocks=24)
    await engine.start()
    engine.timing_learner = KnownTokenTime(1.0)
    for _ in range(2):
        assert [await answer(engine, request) for request in requests] == expected
    assert engine.tiers.tiers[0].counters.loaded_blocks > 50
    assert await run_all(*(answer(engine, request) for request in requests)) == expected
    await asyncio.sleep(0.05)
    check_idle(engine)
    await engine.stop()


async def test_a_host_budget_beyond_the_memory_is_refused(make_engine: Any) -> None:
    engine = make_engine(CacheSettings(cpu_size=1 << 50))
    with pytest.raises(ConfigError, match="MiB of memory are free") as caught:
        await engine.start()
    assert "--kv-host-size" in caught.value.hint
    as_large_as_the_device = CacheSettings(enable_offloading=True, offload_targets=("cpu",))
    with pytest.raises(ConfigError, match="takes 1000 MiB, and 10 MiB of memory are free"):
        plan_host_blocks(as_large_as_the_device, 1, 1000, 1 << 20, 10 << 20)


@pytest.mark.parametrize(
    ("policy", "token_s", "stores"), [("worth", 1e-9, False), ("lru", 1e-9, True)]
)
async def test_blocks_go_down_by_their_worth_or_always(
    make_engine: Any, make_request: Any, policy: str, token_s: float, stores: bool
) -> None:
    """Loads that take longer than computing never pay: with `worth` nothing goes down."""
    cache = CacheSettings(cpu_size=200 * BLOCK_BYTES, offload_policy=policy)
    engine = make_engine(cache, num_blocks=24)
    await engine.start()
    engine.timing_learner = KnownTokenTime(token_s)
    for prompt in PROMPTS[:3]:
        await answer(engine, make_request(prompt, 4))
    assert bool(engine.tiers.tiers[0].blocks) == stores
    assert engine.tiers.arrivals.prompts == 0
    await engine.stop()


async def test_equal_prompts_load_their_blocks_once(make_engine: Any, make_request: Any) -> None:
    engine = make_engine(CacheSettings(cpu_size=200 * BLOCK_BYTES), num_blocks=48)
    await engine.start()
    engine.timing_learner = KnownTokenTime(1.0)
    first = await answer(engine, make_request(PROMPTS[0], 10))
    for prompt in PROMPTS[1:4]:
        await answer(engine, make_request(prompt, 10))

    same = [make_request(PROMPTS[0], 10) for _ in range(2)]
    alike = make_request(PROMPTS[4], 10)
    answers = await run_all(*(answer(engine, request) for request in (*same, alike)))

    assert answers[:2] == [first] * 2
    assert 0 < engine.tiers.tiers[0].counters.loaded_blocks <= len(PROMPTS[0]) // 4
    check_idle(engine)
    await engine.stop()
