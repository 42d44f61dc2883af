#!/usr/bin/env python3
"""Compare the answers of the native engine on PyTorch with those on NumPy: float32, on the CPU.

    make test-torch                 once, for the environment
    .venv-torch/bin/python benchmarks/torch_beside_numpy.py [--model MODEL] [--prompts 200] [--tokens 8]

Greedy answers are to be equal. Seeded ones may differ where a random number lies within rounding of the boundary of two
tokens. Logits differ by 1e-5, as those of NumPy do in batches of other sizes. NumPy computes the first token that
differs again, alone. The script tells how far the random number is from giving PyTorch's token; 0: that is NumPy's
token, too. The script fails if that is more than NEAR, or if a greedy answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native import sampling as native
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.torch.device import TorchDevice
from dynamo.inference.torch.runner import TorchRunner
from dynamo.models.resolve import resolve_model_blocking
from dynamo.testing.fakes import CollectedReply

NEAR = 1e-4
ORACLE = Path(__file__).parents[1] / "tests" / "data" / "oracle" / "greedy.json"
STREAMS = 16
GREEDY = SamplingParams(temperature=0)


def make_prompts(count: int) -> list[list[int]]:
    """Return beginnings of the prompts of the tests."""
    chooser = random.Random(6)
    prompts = [answer["prompt_ids"] for answer in json.loads(ORACLE.read_text())["answers"]]
    short = [prompt for prompt in prompts if len(prompt) < 200]
    chosen = [chooser.choice(short) for _ in range(count)]
    return [prompt[: chooser.randrange(3, len(prompt) + 1)] for prompt in chosen]


def seeded(number: int) -> SamplingParams:
    """Return the sampling of a prompt: every third one has no filter."""
    top_p, top_k = ((1.0, 0), (0.95, 0), (1.0, 50))[number % 3]
    return SamplingParams(temperature=0.9, top_p=top_p, top_k=top_k, seed=number)


async def ask(
    engine: BatchedEngine,
    prompt: list[int],
    sampling: SamplingParams,
    tokens: int,
    resumed: int = 0,
) -> list[int]:
    stops, reply = StopConditions(max_tokens=tokens, ignore_eos=True), CollectedReply()
    request = GenerateRequest("r", "m", pack_ids(prompt), sampling, stops, resumed=resumed)
    await engine.generate(request, Context("r"), reply)
    return reply.ids


async def ask_all(
    engine: BatchedEngine, prompts: list[list[int]], samplings: list[SamplingParams], tokens: int
) -> list[list[int]]:
    streams = asyncio.Semaphore(STREAMS)

    async def ask_one(prompt: list[int], sampling: SamplingParams) -> list[int]:
        async with streams:
            return await ask(engine, prompt, sampling, tokens)

    return await run_all(*map(ask_one, prompts, samplings))


async def distance(
    engine: BatchedEngine, prompt: list[int], sampling: SamplingParams, resumed: int, token: int
) -> float:
    """Return how far NumPy's random number is from one that gives `token`; at most 1."""
    rows: list[Any] = []
    original = native.sample_row

    def record(row: Any, *args: Any) -> int:
        rows.append(row.copy())
        return original(row, *args)

    native.sample_row = record
    await ask(engine, prompt, sampling, 1, resumed)
    native.sample_row = original
    chance = native.uniform(sampling.seed, 0, resumed)
    for step in [0.0, *np.geomspace(1e-9, 1.0, 200).tolist()]:
        for near in (chance - step, chance + step):
            inside = min(max(near, 0.0), 1 - 1e-12)
            if native.sample_filtered(rows[0].copy(), sampling, inside) == token:
                return float(step)
    return 1.0


async def run(args: argparse.Namespace) -> int:
    files = resolve_model_blocking(args.model, ensure_verified=False)
    settings = EngineSettings(threads=args.threads, num_blocks=1200)
    engines = [
        BatchedEngine(NativeRunner(files.open_weights, settings, context_tokens=2048)),
        BatchedEngine(
            TorchRunner(
                files.open_weights, settings, TorchDevice("cpu", "float32"), context_tokens=2048
            )
        ),
    ]
    for engine in engines:
        await engine.start()
    prompts, failures = make_prompts(args.prompts), 0
    for name in ("greedy", "seeded"):
        samplings = [seeded(n) if name == "seeded" else GREEDY for n in range(len(prompts))]
        engines[1].runner.runs_ahead = name == "seeded"  # as on a card
        began = time.monotonic()
        numpy, torch = [await ask_all(each, prompts, samplings, args.tokens) for each in engines]
        other = [
            number
            for number, pair in enumerate(zip(numpy, torch, strict=True))
            if pair[0] != pair[1]
        ]
        print(f"{name}: {len(prompts) - len(other)} of {len(prompts)} answers of {args.tokens} tokens are equal "
              f"({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip
        for number in other:
            place = next(
                n
                for n, pair in enumerate(zip(numpy[number], torch[number], strict=True))
                if pair[0] != pair[1]
            )
            off, sampling = 1.0, samplings[number]
            if name == "seeded":
                context = prompts[number] + numpy[number][:place]
                off = await distance(engines[0], context, sampling, place, torch[number][place])
            failures += off > NEAR
            print(f"  prompt {number} (top_p {sampling.top_p}, top_k {sampling.top_k}), token {place}: the random "
                  f"number is {off:.1g} from giving PyTorch's token")  # fmt: skip
    for engine in engines:
        await engine.stop()
    return min(failures, 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the default model")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
