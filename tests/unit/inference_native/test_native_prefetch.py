"""Blocks of waiting prompts are loaded ahead, and those of preempted ones come back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.invariants import check_slots
from tests.support.token_time import KnownTokenTime
from tests.unit.inference.conftest import RecordingReply
from tests.unit.inference_native.test_native_tiers import BLOCK_BYTES, answer, check_idle

from dynamo.core.context import Context
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import SamplingParams
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.tiers.disk import DiskTier

GREEDY = SamplingParams(temperature=0.0)
rng = np.random.default_rng(11)
PROMPT = rng.integers(0, 320, 66).tolist()
OTHER = rng.integers(0, 320, 30).tolist()
PROMPT_BLOCKS = 16


async def start(
    make_engine: Any, cache: CacheSettings, num_blocks: int, max_num_seqs: int = 8
) -> BatchedEngine:
    engine: BatchedEngine = make_engine(cache, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    await engine.start()
    engine.timing_learner = KnownTokenTime(1.0)  # so that every load is worth it
    return engine


@pytest.fixture
async def disk(make_engine: Any, make_request: Any, tmp_path: Path) -> tuple[CacheSettings, Any]:
    """Settings of host memory above a disk that has the blocks of PROMPT, and its answer."""
    cache = CacheSettings(
        ssd_size=1 << 20,
        ssd_path=str(tmp_path / "kv"),
        cpu_size=100 * BLOCK_BYTES,
        offload_policy="lru",
    )
    engine = await start(make_engine, cache, num_blocks=24)
    expected = await answer(engine, make_request(PROMPT, 8, sampling=GREEDY))
    for seed in range(3):
        other = np.random.default_rng(seed).integers(0, 320, 66).tolist()
        await answer(engine, make_request(other, 8, sampling=GREEDY))
    assert engine.tiers.tiers[1].blocks >= PROMPT_BLOCKS
    await engine.stop()
    return cache, expected


async def test_a_waiting_prompt_comes_nearer(
    make_engine: Any, make_request: Any, disk: tuple[CacheSettings, Any]
) -> None:
    """With one sequence at a time, the prompt waits while its blocks go from disk to host memory."""
    cache, expected = disk
    engine = await start(make_engine, cache, num_blocks=24, max_num_seqs=1)
    host, store = engine.tiers.tiers
    first, tasks = RecordingReply(), BackgroundTasks()
    tasks.start(engine.generate(make_request(OTHER, 60), Context("a"), first))
    await first.first.wait()
    waiting = tasks.start(answer(engine, make_request(PROMPT, 8, sampling=GREEDY)))
    async with asyncio.timeout(20):
        while host.blocks < PROMPT_BLOCKS:
            assert first.end is None, "the blocks did not come while the prompt waited"
            await asyncio.sleep(0)

    assert await waiting == expected
    assert (host.counters.loaded_blocks, store.counters.loaded_blocks) == (16, 16)
    await tasks.join()
    check_idle(engine)
    await engine.stop()


@pytest.mark.parametrize("failing", [False, True])
async def test_a_prompt_is_admitted_when_its_prefetch_has_ended(
    make_engine: Any,
    make_request: Any,
    disk: tuple[CacheSettings, Any],
    monkeypatch: pytest.MonkeyPatch,
    failing: bool,
) -> None:
    """The engine is idle when the slow prefetch ends or fails: the prompt is not forgotten."""
    cache, expected = disk
    engine = await start(make_engine, cache, num_blocks=24, max_num_seqs=1)
    host = engine.tiers.tiers[0]
    load, go_on = DiskTier.load, asyncio.Event()

    async def slow_load(tier: DiskTier, blocks: Any, on_loaded: Any) -> None:
        await go_on.wait()
        if failing:
            blocks = [*blocks[:3]]
            tier.slots.remove(tier.slots.table.find(blocks[2].block_hash))
        await load(tier, blocks, on_loaded)

    monkeypatch.setattr(DiskTier, "load", slow_load)
    first, tasks = RecordingReply(), BackgroundTasks()
    tasks.start(engine.generate(make_request(OTHER, 6), Context("a"), first))
    await first.first.wait()
    waiting = tasks.start(answer(engine, make_request(PROMPT, 8, sampling=GREEDY)))
    async with asyncio.timeout(20):
        while first.end is None:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    go_on.set()
    assert await waiting == expected
    assert host.counters.loaded_blocks == (2 if failing else 16)
    await tasks.join()
    check_idle(engine)
    check_slots(host.slots)  # type: ignore[attr-defined]
    await engine.stop()


@pytest.mark.parametrize("host_blocks", [0, 300])
async def test_a_preempted_sequence_loads_instead_of_computing(
    make_engine: Any, make_request: Any, host_blocks: int
) -> None:
    """Answers grow until the last sequence is preempted; its blocks are in host memory then."""
    prompts = [rng.integers(0, 320, length).tolist() for length in (200, 200, 100)]
    requests = [make_request(prompt, 95) for prompt in prompts]
    alone = make_engine(num_blocks=200)
    await alone.start()
    expected = [await answer(alone, request) for request in requests]
    await alone.stop()

    cache = CacheSettings(cpu_size=host_blocks * BLOCK_BYTES)
    engine: BatchedEngine = make_engine(cache, num_blocks=150)
    await engine.start()
    engine.timing_learner = KnownTokenTime(1.0)
    computed, parked = count_prefill(engine), watch_preemptions(engine)
    assert await run_all(*(answer(engine, request) for request in requests)) == expected
    assert engine.scheduler.preemptions == 1
    if host_blocks:
        assert engine.tiers.tiers[0].counters.loaded_blocks >= 25
        assert min(parked) > 0.9, "its blocks were not in host memory before"
        assert sum(computed) < 500 + 10 * 4, "the preempted prompt was computed again"
        check_idle(engine)
    else:
        assert sum(computed) > 500 + 100
    await engine.stop()


def count_prefill(engine: BatchedEngine) -> list[int]:
    """Return a list that gets the prompt tokens of each step."""
    counts: list[int] = []
    step = engine.runner.step

    def counted(plan: Any) -> Any:
        counts.append(plan.new_tokens)
        return step(plan)

    engine.runner.step = counted  # type: ignore[method-assign]
    return counts


def watch_preemptions(engine: BatchedEngine) -> list[float]:
    """Return a list that gets the share of a preempted sequence's blocks in host memory."""
    shares: list[float] = []
    preempt = engine.scheduler._preempt

    def watched(sequence: Any) -> None:
        blocks = sequence.blocks[: sequence.registered_blocks]
        if engine.tiers.can_load:
            held = [engine.tiers.tiers[0].holds(block.block_hash) for block in blocks]
            shares.append(sum(held) / len(held))
        preempt(sequence)

    engine.scheduler._preempt = watched  # type: ignore[method-assign]
    return shares
