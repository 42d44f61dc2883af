"""The whole native engine: batching, chunks, cache, preemption and eviction change no token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import SamplingParams, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.runner import NativeRunner
from dynamo.models.checkpoint.weights import SafetensorsWeights

rng = np.random.default_rng(11)
PROMPTS = [rng.integers(0, 320, size).tolist() for size in (1, 5, 23, 40, 64, 9)]
COUNT = 12


async def generate_all(engine: Any, requests: list[Any]) -> list[Any]:
    replies = [RecordingReply() for _ in requests]
    await run_all(
        *(
            engine.generate(request, Context("r"), reply)
            for request, reply in zip(requests, replies, strict=True)
        )
    )
    return replies


@pytest.fixture(scope="module")
def expected(reference_llama: Any) -> list[list[int]]:
    return [reference_llama.greedy(prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"threads": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 2},
        {"prefix_caching": False},
        {"num_blocks": 22},
        {"num_blocks": 20, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
async def test_every_schedule_gives_the_reference_s_tokens(
    make_engine: Any, make_request: Any, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    engine = make_engine(**settings)
    await engine.start()
    for _ in range(2):
        replies = await generate_all(engine, [make_request(prompt, COUNT) for prompt in PROMPTS])
        assert [reply.ids for reply in replies] == expected
    if settings.get("num_blocks"):
        assert engine.scheduler.preemptions > 0
    elif settings.get("prefix_caching", True):
        assert [reply.started.cached_tokens for reply in replies] == [0, 4, 20, 36, 60, 8]
    await engine.stop()


async def test_a_resumed_request_generates_the_same_rest(
    make_engine: Any, make_request: Any
) -> None:
    engine = make_engine()
    await engine.start()
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=5, frequency_penalty=0.5)
    whole, other = await generate_all(
        engine,
        [make_request(PROMPTS[2], 10, sampling=sampling, choice=choice) for choice in (0, 1)],
    )
    assert whole.ids != other.ids
    rest = make_request(PROMPTS[2] + whole.ids[:4], 6, sampling=sampling, resumed=4)
    [resumed] = await generate_all(engine, [rest])
    assert whole.ids == whole.ids[:4] + resumed.ids
    await engine.stop()


async def test_logprobs_are_those_of_the_unmodified_distribution(
    make_engine: Any, make_request: Any, reference_llama: Any
) -> None:
    engine = make_engine()
    await engine.start()
    biased = SamplingParams(temperature=0, logit_bias={17: 100.0})
    got, plain = await generate_all(
        engine,
        [make_request(PROMPTS[1], 1, sampling=biased, top_logprobs=3), make_request(PROMPTS[1], 1)],
    )
    logits = reference_llama.logits(PROMPTS[1])[-1]
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs)[:3]
    assert got.ids == [17]
    [extra] = got.extras
    assert extra.logprob == pytest.approx(logprobs[17], abs=1e-4)
    assert [token for token, _ in extra.top] == best.tolist()
    assert [value for _, value in extra.top] == pytest.approx(logprobs[best], abs=1e-4)
    assert plain.extras == [None]
    await engine.stop()


async def test_min_tokens_bans_stop_tokens(
    make_engine: Any, make_request: Any, expected: list[list[int]]
) -> None:
    engine = make_engine()
    await engine.start()
    stop = expected[2][0]
    stops = StopConditions(max_tokens=6, min_tokens=3, stop_token_ids=(stop,))
    [got] = await generate_all(engine, [make_request(PROMPTS[2], 6, stops=stops)])
    assert stop not in got.ids[:3]
    [at_once] = await generate_all(
        engine,
        [make_request(PROMPTS[2], 6, stops=StopConditions(max_tokens=6, stop_token_ids=(stop,)))],
    )
    assert at_once.ids == []
    assert at_once.end.stop_token == stop
    await engine.stop()


async def test_a_cancelled_request_frees_its_area(make_engine: Any, make_request: Any) -> None:
    engine = make_engine(max_num_seqs=1)
    await engine.start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.generate(make_request(PROMPTS[0], 200), Context("r"), RecordingReply())
    [got] = await generate_all(engine, [make_request(PROMPTS[1], 2)])
    assert len(got.ids) == 2
    assert engine.report_load().running == 0
    await engine.stop()


async def test_damaged_weights_fail_every_request_with_the_reason(
    tiny_llama: Path, make_request: Any
) -> None:
    class Damaged(SafetensorsWeights):
        def stored(self, name: str) -> Any:
            stored = super().stored(name)
            if name.endswith("0.mlp.down_proj.weight"):
                stored = stored.copy()
                stored[3, 3] = np.nan
            return stored

    settings = EngineSettings(threads=2, num_blocks=64, block_size=4)
    engine = BatchedEngine(NativeRunner(lambda: Damaged(tiny_llama), settings))
    await engine.start()
    for sampling in (SamplingParams(temperature=0), SamplingParams()):
        request = make_request(PROMPTS[1], 2, sampling=sampling)
        with pytest.raises(WorkerFailed, match="not finite"):
            await engine.generate(request, Context("r"), RecordingReply())
    assert engine.report_load().running == engine.report_load().active_blocks == 0
    await engine.stop()
