"""Several ranks on the CPU, by gloo: they answer as one does, and none survives another."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.inference_native.conftest import write_tiny_llama
from tests.unit.inference_native.test_native_runner import COUNT, PROMPTS, generate_all
from tests.unit.inference_native.test_shapes import (
    CASES,
    random_prompts,
    write_model,
)

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import GenerateRequest, SamplingParams
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.engine_sizing import plan_engine_info
from dynamo.inference.native.kv_storage import KvShape
from dynamo.inference.torch.device import TorchDevice
from dynamo.inference.torch.engine import check_ranks
from dynamo.models.checkpoint.weights import open_weights

pytest.importorskip("torch", reason="make test-torch installs PyTorch")

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=0, seed=3)


def open_ranks(folder: Path, size: int, **settings: Any) -> BatchedEngine:
    """Return an engine of `size` ranks."""
    from dynamo.inference.torch.runner import TorchRunner
    from dynamo.inference.torch.tensor_parallel import TensorParallelRunner

    sizes = {"threads": 1, "num_blocks": 64, "block_size": 4, "tensor_parallel_size": size}
    chosen = EngineSettings(**(sizes | settings))
    runner = TorchRunner if size == 1 else TensorParallelRunner
    return BatchedEngine(
        runner(partial(open_weights, folder), chosen, TorchDevice("cpu", "float32"))
    )


async def answer(engine: BatchedEngine, requests: list[GenerateRequest]) -> list[list[int]]:
    await engine.start()
    replies = [await generate_all(engine, requests) for _ in range(2)]  # then from cached blocks
    await engine.stop()
    return [reply.ids for round_ in replies for reply in round_]


async def test_two_ranks_answer_as_one(tiny_llama: Path, make_request: Any) -> None:
    requests = [make_request(prompt, COUNT) for prompt in PROMPTS]
    requests += [make_request(prompt, COUNT, sampling=SEEDED) for prompt in PROMPTS]
    alone, shared = [
        await answer(open_ranks(tiny_llama, size, max_num_batched_tokens=24), requests)
        for size in (1, 2)
    ]
    assert shared == alone


@pytest.mark.parametrize("name", ["gemma3", "qwen2", "phi3"])
async def test_other_shapes(tmp_path: Path, make_request: Any, name: str) -> None:
    """Gemma norms the sum of all ranks; Qwen2 has biases, Phi-3 fused matrices."""
    folder = write_model(tmp_path, CASES[name])
    requests = [make_request(prompt, 16) for prompt in random_prompts(name)]
    alone, shared = [await answer(open_ranks(folder, size), requests) for size in (1, 2)]
    assert shared == alone


@pytest.mark.parametrize("largest", [0, 1])
async def test_the_rank_with_the_least_room_decides(
    tiny_llama: Path, make_request: Any, largest: int
) -> None:
    from dynamo.inference.torch.tensor_parallel import RankWeights

    request, least, most = make_request(PROMPTS[3], COUNT), 2_000_000, 3_000_000
    alone = (await answer(open_ranks(tiny_llama, 1), [request]))[0]
    engine = open_ranks(tiny_llama, 2, num_blocks=0)
    runner: Any = engine.runner
    runner._memory_bytes = least if largest else most
    runner._plan = runner._plan._replace(memory_bytes=most if largest else least)

    info = await engine.start()

    config = RankWeights(open_weights(tiny_llama), 0, 2).config
    shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
    planned = [
        plan_engine_info(runner._settings, config, shape, 0, size).num_blocks
        for size in (least, most)
    ]
    assert info.num_blocks == planned[0] < planned[1]
    assert (await generate_all(engine, [request]))[0].ids == alone
    await engine.stop()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.unit.inference_torch.test_tensor_parallel import open_ranks

async def main():
    engine = open_ranks(Path(sys.argv[1]), 2)
    await engine.start()
    os.kill(engine.runner._children[0].pid, signal.SIGKILL)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_dead_rank_ends_the_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(write_tiny_llama(tmp_path, tied=True))]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        1, "the worker ends: rank 1 ended with status -9",
    )  # fmt: skip
    assert not list(tmp_path.glob("dynamo-ranks-*"))


@pytest.mark.parametrize(
    ("size", "settings", "expected"),
    [
        (4, {}, "it does not divide the model's 6 query heads and 2 KV heads: use 2"),
        (2, {"data_parallel_size": 2}, "data-parallel ranks share one process"),
        (2, {"role": "prefill"}, "workers of several devices exchange no KV blocks"),
    ],
)
def test_a_size_that_does_not_fit(size: int, settings: dict[str, Any], expected: str) -> None:
    config: Any = SimpleNamespace(num_heads=6, num_kv_heads=2, intermediate_size=96, qk_norm="")
    chosen = EngineSettings(tensor_parallel_size=size, **settings)
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, chosen, CacheSettings(), TorchDevice("cpu", "float32"))
    text = f"{caught.value}: {caught.value.hint}"
    assert text.startswith(f"engine.tensor_parallel_size is {size}, and {expected}")


@pytest.mark.parametrize(("cards", "visible"), [(1, "1 card is"), (2, "2 cards are")])
def test_more_devices_than_cards(monkeypatch: pytest.MonkeyPatch, cards: int, visible: str) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    config: Any = SimpleNamespace(num_heads=8, num_kv_heads=4, intermediate_size=96, qk_norm="")
    settings = EngineSettings(tensor_parallel_size=4)
    message = f"engine.tensor_parallel_size is 4, and {visible} visible"
    with pytest.raises(ConfigError, match=message) as caught:
        check_ranks(config, settings, CacheSettings(), TorchDevice("cuda", "bfloat16"))
    assert caught.value.hint.startswith(f"use {cards}, or name more in --device-ids")
