"""The view of real vLLM's prefix cache: after mixed requests it predicts every cached token.

A random model of two layers is enough, since only the cache matters.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace
from tests.conftest import write_tiny_model
from tests.unit.inference_native.conftest import write_safetensors

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.engine_registry import EngineInputs
from dynamo.inference.engines.rank import ViewedRank
from dynamo.inference.vllm.engine import VllmEngine
from dynamo.models.resolve import resolve_model
from dynamo_conformance.engines import assert_idle, generate_reply, make_request

REQUESTS = 1000
PROBES = 200
AT_ONCE = 8
SALTS = ("", "", "tenant-a", "tenant-b")
ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 96,
    "max_model_len": 1024,
    "block_size": 32,
}
Prompt = tuple[list[int], str]


def write_random_llama(folder: Path) -> Path:
    """Write a model folder with a tokenizer and random weights of a shape that vLLM computes."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    hidden, head, vocab = 128, 64, config["vocab_size"]
    config |= {"hidden_size": hidden, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"head_dim": head, "tie_word_embeddings": True, "torch_dtype": "float32"}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name, inner = f"model.layers.{layer}.", config["intermediate_size"]
        shapes |= {
            f"{name}self_attn.q_proj.weight": (2 * head, hidden),
            f"{name}self_attn.k_proj.weight": (head, hidden),
            f"{name}self_attn.v_proj.weight": (head, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, 2 * head),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
        }
    chance = np.random.default_rng(7)
    tensors = {name: chance.normal(0, 0.2, shape) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts(chance: random.Random, count: int) -> list[Prompt]:
    """Return prompts of up to 9 pieces of 40 tokens from a tree, so that many share prefixes."""
    result = []
    for _ in range(count):
        pieces = [chance.randrange(4) for _ in range(chance.randrange(1, 10))]
        ids = [20 + (piece * 50 + index) % 500 for piece in pieces for index in range(40)]
        result.append(([*ids, 3][: chance.randrange(1, len(ids) + 2)], chance.choice(SALTS)))
    return result


async def send(engine: VllmEngine, prompt: Prompt, tokens: int) -> int:
    """Generate and return the cached tokens."""
    ids, salt = prompt
    reply = await generate_reply(engine, replace(make_request(ids, tokens), salt=salt))
    assert reply.started is not None
    return reply.started.cached_tokens


async def mix(engine: VllmEngine, work: Sequence[Prompt], chance: random.Random) -> None:
    """Send requests, `AT_ONCE` at a time: equal prompts at once, and one in ten cancelled."""
    free = asyncio.Semaphore(AT_ONCE)

    async def run(prompt: Prompt, tokens: int, cut_s: float | None) -> None:
        try:
            async with asyncio.timeout(cut_s):
                await send(engine, prompt, tokens)
        except TimeoutError:
            pass
        finally:
            free.release()

    async with BackgroundTasks() as tasks:
        for number, (before, prompt) in enumerate(pairwise([work[0], *work])):
            await free.acquire()
            cut_s = chance.random() / 20 if number % 10 == 9 else None
            chosen = before if number % 5 == 4 else prompt
            tasks.start(run(chosen, chance.randrange(1, 40), cut_s))
        await tasks.join()
    await assert_idle(engine)


async def settled(view: ViewedRank) -> None:
    """Return when no message has come for a while."""
    assert view.reader is not None
    before = -1
    while before != (before := view.reader.counts["messages"]):
        await asyncio.sleep(0.2)


async def probe(engine: VllmEngine, work: Sequence[Prompt]) -> list[tuple[int, int]]:
    """Return (predicted, real) cached tokens of prompts that are sent one after the other."""
    view = engine.ranks[0]
    pairs = []
    for ids, salt in work:
        await settled(view)
        predicted = view.blocks.predict(pack_ids(ids), salt)
        pairs.append((predicted, await send(engine, (ids, salt), 1)))
    return pairs


@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="class")
class TestVllmCacheView:
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory: Any) -> AsyncIterator[VllmEngine]:
        model = write_random_llama(tmp_path_factory.mktemp("models") / "random")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        files = await resolve_model(str(model), with_weights=True)
        settings = Settings(engine=EngineSettings(kind="vllm", max_num_seqs=16, args=ARGUMENTS))
        card = files.build_card(block_tokens=16)
        engine = VllmEngine(EngineInputs(settings, card, files, SystemClock()))
        await engine.start()
        yield engine
        await engine.stop()

    async def test_predictions_are_exact_after_mixed_requests(self, engine: VllmEngine) -> None:
        chance = random.Random(3)
        await mix(engine, prompts(chance, REQUESTS), chance)
        pairs = await probe(engine, prompts(chance, PROBES))
        assert [pair for pair in pairs if pair[0] != pair[1]] == []
        assert sum(real for _, real in pairs) > 0
        assert engine.ranks[0].drift.counts["too_high"] == 0

    async def test_predictions_are_exact_after_a_gap(self, engine: VllmEngine) -> None:
        reader = engine.ranks[0].reader
        assert reader is not None
        chance = random.Random(4)
        parse = reader._parse
        lost = iter([None] * 5)
        reader._parse = lambda frames: parse(frames) if next(lost, True) else None  # type: ignore[method-assign]
        await mix(engine, prompts(chance, 50), chance)
        reader._parse = parse  # type: ignore[method-assign]
        assert reader.counts["repaired"] == 1
        pairs = await probe(engine, prompts(chance, 20))
        assert [pair for pair in pairs if pair[0] != pair[1]] == []

    async def test_predictions_are_exact_after_a_rebuild(self, engine: VllmEngine) -> None:
        reader = engine.ranks[0].reader
        assert reader is not None
        await reader._rebuild_alone()
        chance = random.Random(5)
        pairs = await probe(engine, prompts(chance, 20))
        assert [pair for pair in pairs if pair[0] != pair[1]] == []

    async def test_predictions_are_exact_after_an_idle_engine_is_cleared(
        self, engine: VllmEngine
    ) -> None:
        view = engine.ranks[0]
        await assert_idle(engine)
        assert await engine.clear_blocks() > 0
        assert len(view.blocks) == 0
        chance = random.Random(6)
        pairs = await probe(engine, prompts(chance, 20))
        assert pairs[0] == (0, 0)
        assert [pair for pair in pairs if pair[0] != pair[1]] == []

    async def test_a_replay_that_does_not_reach_back_predicts_too_little(
        self, engine: VllmEngine
    ) -> None:
        """The engine still holds blocks of which no event tells. None is predicted in vain, and
        what is computed from then on is known."""
        reader = engine.ranks[0].reader
        assert reader is not None
        chance = random.Random(7)
        parse, endpoint = reader._parse, reader._endpoint
        reader._endpoint = replace(endpoint, replay="")
        lost = iter([None] * 5)
        reader._parse = lambda frames: parse(frames) if next(lost, True) else None  # type: ignore[method-assign]
        await mix(engine, prompts(chance, 50), chance)
        reader._parse, reader._endpoint = parse, endpoint  # type: ignore[method-assign]
        pairs = await probe(engine, prompts(chance, 20))
        assert all(predicted <= real for predicted, real in pairs)
        await engine.clear_blocks()
        pairs = await probe(engine, prompts(chance, 20))
        assert [pair for pair in pairs if pair[0] != pair[1]] == []
