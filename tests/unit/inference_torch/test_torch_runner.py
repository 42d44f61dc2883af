"""The engine on PyTorch: blocks in place give the reference's tokens under every schedule."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.inference_native.test_native_runner import COUNT, PROMPTS, expected, generate_all

from dynamo.core.values import SamplingParams

pytest.importorskip("torch", reason="make test-torch installs PyTorch")

__all__ = ["expected"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
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


SAMPLINGS = (
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=0, seed=6),
    SamplingParams(temperature=1.2, top_p=0.95, top_k=20, min_p=0.02, seed=7),
    SamplingParams(temperature=0.7, top_p=1.0, top_k=5, seed=8, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=9, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=0.5, logit_bias={7: 3.0, 9: -4.0}),
)


@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_answers_and_logprobs_are_those_of_numpy(
    make_engine: Any, make_request: Any, runs_ahead: bool
) -> None:
    requests = [
        make_request(prompt, 16, sampling=sampling, choice=choice, **fields)
        for prompt, sampling, fields in zip(
            PROMPTS, SAMPLINGS, [{}, {"top_logprobs": 4}, {"prompt_logprobs": 3}] * 2, strict=True
        )
        for choice in (0, 1)
    ]
    results = []
    for dtype in ("numpy", "float32"):
        engine = make_engine(dtype)
        engine.runner.runs_ahead = runs_ahead and dtype == "float32"
        await engine.start()
        results.append(await generate_all(engine, requests))
        await engine.stop()
    for numpy_reply, reply in zip(*results, strict=True):
        assert reply.ids == numpy_reply.ids
        for mine, other in zip(reply.extras, numpy_reply.extras, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        prompts = [each.end.prompt_logprobs or () for each in (reply, numpy_reply)]
        for mine, other in zip(*prompts, strict=True):
            assert (mine.token, mine.rank) == (other.token, other.rank)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


async def test_sixty_answers_are_those_of_numpy(make_engine: Any, make_request: Any) -> None:
    """Greedy and seeded, with and without filters. `benchmarks/torch_beside_numpy.py` asks 200
    prompts of the default model."""
    chooser = random.Random(11)
    samplings = (SamplingParams(temperature=0), *SAMPLINGS[:3])
    requests = [
        make_request(
            [chooser.randrange(320) for _ in range(chooser.randrange(1, 50))],
            8,
            sampling=replace(samplings[number % 4], seed=number),
        )
        for number in range(60)
    ]
    answers = []
    for dtype in ("numpy", "float32"):
        engine = make_engine(dtype, num_blocks=400)
        await engine.start()
        answers.append([reply.ids for reply in await generate_all(engine, requests)])
        await engine.stop()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_short_formats_stay_near_float32(
    make_engine: Any, make_request: Any, dtype: str
) -> None:
    """The logprobs of prompts differ by at most 0.35 in bfloat16, and 0.05 in float16."""
    rows = []
    for name in ("float32", dtype):
        engine = make_engine(name)
        await engine.start()
        replies = await generate_all(
            engine, [make_request(prompt, 1, prompt_logprobs=0) for prompt in PROMPTS]
        )
        rows.append([entry.logprob for reply in replies for entry in reply.end.prompt_logprobs])
        await engine.stop()
    differences = [abs(mine - other) for mine, other in zip(*rows, strict=True)]
    assert 0 < max(differences) < (0.35 if dtype == "bfloat16" else 0.05)
    assert math.fsum(differences) / len(differences) < (0.05 if dtype == "bfloat16" else 0.006)
