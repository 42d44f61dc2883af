"""Random operations on blocks in place against a dense reference, and exchange with NumPy."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.token_time import KnownTokenTime
from tests.unit.inference.conftest import RecordingReply
from tests.unit.inference_native.test_native_disaggregation import (
    GREEDY,
    PROMPTS,
    SEEDED,
    NativePair,
)
from tests.unit.inference_native.test_native_tiers import BLOCK_BYTES, answer
from tests.unit.inference_native.test_native_tiers import PROMPTS as TIER_PROMPTS

from dynamo.core.context import Context
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import SamplingParams
from dynamo.inference.model_runner import StepPlan, StepResult

pytest.importorskip("torch", reason="make test-torch installs PyTorch")


def fill_unused_blocks(engine: Any) -> None:
    """Let every step find NaN in blocks that are neither referenced nor cached."""
    runner, compute = engine.runner, engine.runner.step

    async def step(plan: StepPlan) -> StepResult:
        kv_blocks = runner._backend.attention.kv_blocks
        for block in engine.scheduler.pool._blocks:
            if not block.ref_count and not block.cached:
                kv_blocks[block.id] = float("nan")
        result: StepResult = await compute(plan)
        return result

    runner.step = step


class RandomOperations:
    """Sends random prompts with common beginnings to the engines of a pair, mostly to `d`, and
    checks each answer's logits."""

    def __init__(self, pair: NativePair, seed: int, make_request: Any, reference: Any) -> None:
        self.random = random.Random(seed)
        self.pair = pair
        self.make_request = make_request
        self.reference = reference
        self.beginnings = [self.ids(size) for size in (8, 30, 47)]
        self.answers = 0

    def ids(self, size: int) -> list[int]:
        return [self.random.randrange(320) for _ in range(size)]

    async def run(self, operations: int) -> None:
        running: list[asyncio.Task[None]] = []
        for _ in range(operations):
            choice = self.random.random()
            if len(running) < 10:  # at once, so that blocks run out however fast steps are
                running.append(asyncio.ensure_future(self.ask()))
                continue
            if choice < 0.7:
                running.append(asyncio.ensure_future(self.ask()))
            elif choice < 0.8 and running:
                self.random.choice(running).cancel()
            elif choice < 0.85:
                self.random.choice((self.pair.p, self.pair.d)).clear_prefix_cache()
            for _ in range(self.random.choice((0, 1, 5, 40))):
                await asyncio.sleep(0)
        results = await asyncio.gather(*running, return_exceptions=True)
        for result in results:
            if result is not None and not isinstance(result, asyncio.CancelledError):
                raise result

    async def ask(self) -> None:
        beginning = self.random.choice([[], *self.beginnings])
        prompt = beginning[: self.random.randrange(1, 60)] + self.ids(self.random.randrange(1, 20))
        sampling = self.random.choice((
            SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=len(prompt)),
        ))  # fmt: skip
        engine = self.random.choice((self.pair.p, *[self.pair.d] * 4))
        request = self.make_request(
            prompt,
            self.random.randrange(1, 24),
            sampling=sampling,
            top_logprobs=0,
            priority=self.random.randrange(2),
            prefill=self.random.choice(("", "p")) if engine.kv_source else "",
        )
        reply = RecordingReply()
        await engine.generate(request, Context("r"), reply)
        logits = self.reference.logits(prompt + reply.ids)[len(prompt) - 1 : -1]
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, token, extra in zip(expected, reply.ids, reply.extras, strict=True):
            assert extra.logprob == pytest.approx(row[token], abs=1e-3)
        self.answers += 1


@pytest.mark.parametrize("dtype", ["float32", "apart"])
@pytest.mark.parametrize("seed", range(4))
async def test_random_operations(
    make_engine: Any,
    make_request: Any,
    reference_llama: Any,
    tmp_path: Path,
    dtype: str,
    seed: int,
) -> None:
    """Prompts are admitted, preempted, hit, cancelled, come from tiers; two seeds take some from
    another engine, and two compute steps ahead, as on a card."""
    sizes: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    cache = CacheSettings(
        cpu_size=40 * BLOCK_BYTES, ssd_size=1 << 20, ssd_path=tmp_path, offload_policy="lru"
    )
    pair = NativePair(make_engine(dtype, **sizes), make_engine(dtype, cache, **sizes))
    pair.d.runner.runs_ahead = seed > 1
    await pair.start()
    for engine in (pair.p, pair.d):
        fill_unused_blocks(engine)
        engine.timing_learner = KnownTokenTime(0.1)
    if seed % 2:
        pair.d.kv_source = None
    operations = RandomOperations(pair, seed, make_request, reference_llama)
    await operations.run(80)
    assert operations.answers > 20
    runner: Any = pair.d.runner
    assert (runner._run_ahead.used_rows > 0) == runner.runs_ahead
    assert pair.d.scheduler.preemptions > 0
    assert pair.d.kv_source is None or pair.d.arrivals.counters.blocks_arrived > 0
    assert all(tier.counters.loaded_blocks for tier in pair.d.tiers.tiers)
    while pair.d.tiers.storing:
        await asyncio.sleep(0.001)
    pair.check_idle()
    await pair.p.stop()
    await pair.d.stop()


@pytest.mark.parametrize(
    "dtypes",
    [("numpy", "float32"), ("apart", "numpy"), ("numpy", "apart"), ("apart", "apart")],
    ids=str,
)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_prompts_of_another_kind_of_worker(
    make_engine: Any, make_request: Any, dtypes: tuple[str, str], sampling: SamplingParams
) -> None:
    pair = NativePair(*(make_engine(dtype) for dtype in dtypes))
    await pair.start()
    requests = [make_request(prompt, 10, sampling=sampling) for prompt in PROMPTS]
    expected = await run_all(*(pair.answer(pair.p, request) for request in requests))
    remote = [replace(request, prefill="p") for request in requests]
    replies = await run_all(*(pair.answer(pair.d, request) for request in remote))
    assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    assert pair.d.arrivals.counters.blocks_arrived > 30
    assert not pair.d.arrivals.counters.fallbacks
    await asyncio.sleep(0)
    pair.check_idle()
    await pair.p.stop()
    await pair.d.stop()


@pytest.mark.parametrize("dtypes", [("apart", "numpy"), ("numpy", "apart")], ids=str)
async def test_an_answer_goes_on_at_a_worker_of_the_other_kind(
    make_engine: Any, make_request: Any, dtypes: tuple[str, str]
) -> None:
    """With the blocks of the worker that it left, and without them."""
    pair = NativePair(*(make_engine(dtype) for dtype in dtypes))
    await pair.start()
    pair.d.timing_learner = KnownTokenTime(1.0)
    request = make_request(PROMPTS[3], 12, sampling=SEEDED)
    whole = (await pair.answer(pair.p, request)).ids
    rest = make_request(PROMPTS[3] + whole[:5], 7, sampling=SEEDED, resumed=5)
    for kv_from in ("p", ""):
        reply = await pair.answer(pair.d, replace(rest, kv_from=kv_from))
        assert whole[:5] + reply.ids == whole
        assert pair.d.arrivals.counters.moved == 1
        pair.d.clear_prefix_cache()
    assert (await pair.answer(pair.d, request)).ids == whole
    await asyncio.sleep(0)
    pair.check_idle()
    await pair.p.stop()
    await pair.d.stop()


@pytest.mark.parametrize("dtype", ["float32", "apart"])
async def test_blocks_come_back_from_host_memory(
    make_engine: Any, make_request: Any, dtype: str
) -> None:
    requests = [make_request(prompt, 10, sampling=SEEDED) for prompt in TIER_PROMPTS]
    alone = make_engine("numpy")
    await alone.start()
    expected = [await answer(alone, request) for request in requests]
    await alone.stop()
    engine = make_engine(dtype, CacheSettings(cpu_size=200 * BLOCK_BYTES), num_blocks=24)
    await engine.start()
    fill_unused_blocks(engine)
    engine.timing_learner = KnownTokenTime(1.0)
    for _ in range(2):
        assert [await answer(engine, request) for request in requests] == expected
    assert engine.tiers.tiers[0].counters.loaded_blocks > 50
    await engine.stop()
