"""LoRA adapters of real vLLM: answers equal those of merged weights, and blocks are never shared."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace
from tests.conftest import Deployment, until
from tests.engines.test_vllm_cache_view import settled
from tests.engines.test_vllm_engine import make_engine

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.errors import InvalidRequest
from dynamo.core.hashing import adapter_salt
from dynamo.core.reply import Engine
from dynamo.core.settings import Settings
from dynamo.core.values import GenerateRequest
from dynamo.inference.engine_registry import EngineInputs, open_engine
from dynamo.inference.vllm.engine import VllmEngine
from dynamo.models.resolve import resolve_model
from dynamo_conformance.engines import generate_reply, make_request

RANK, ALPHA, SCALE = 4, 8, 0.15
TOKENS = 12
PROMPT = tuple(range(1000, 1080))


def write_lora(folder: Path, model: Path, seed: int, rank: int = RANK) -> dict[str, Any]:
    """Write an adapter for the queries and values of all layers. Returns what it adds to each
    weight of the model."""
    from safetensors.numpy import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    chance, tensors, deltas = np.random.default_rng(seed), {}, {}
    for layer in range(config["num_hidden_layers"]):
        for projection, size in outputs.items():
            name = f"model.layers.{layer}.self_attn.{projection}"
            down = chance.normal(0, SCALE, (rank, hidden)).astype(np.float32)
            up = chance.normal(0, SCALE, (size, rank)).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            deltas[f"{name}.weight"] = up @ down * (ALPHA / rank)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA}
    content |= {"target_modules": list(outputs), "bias": "none", "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return deltas


@pytest.fixture(scope="module")
def folders(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters, one of a rank that is too high, and the model with the first one merged."""
    from safetensors.numpy import load_file, save_file

    parent = tmp_path_factory.mktemp("adapters")
    names = ("first", "second", "large", "merged")
    folders = {name: parent / name for name in names}
    deltas = write_lora(folders["first"], engine_model, 1)
    write_lora(folders["second"], engine_model, 2)
    write_lora(folders["large"], engine_model, 3, rank=64)
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(engine_model, folders["merged"], ignore=ignore)
    weights = load_file(engine_model / "model.safetensors")
    for name, delta in deltas.items():
        weights[name] = weights[name] + delta
    save_file(weights, folders["merged"] / "model.safetensors")
    return folders


def ask(engine: VllmEngine, name: str, salt: str = "") -> GenerateRequest:
    """Return a greedy request that names an adapter, as the frontend sends it."""
    request = make_request(PROMPT, TOKENS)
    if not name:
        return replace(request, salt=salt)
    assert engine.adapters is not None
    (adapter,) = (key for key in engine.adapters.paths if key.startswith(f"{name}@"))
    return replace(request, adapter=adapter, salt=adapter_salt(adapter, salt))


async def answer(engine: Engine, request: GenerateRequest) -> tuple[list[int], int]:
    """Return ids and cached tokens."""
    reply = await generate_reply(engine, request)
    assert reply.started is not None
    return reply.ids, reply.started.cached_tokens


@pytest.mark.asyncio(loop_scope="class")
class TestVllmAdapters:
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(
        cls, engine_model: Path, folders: dict[str, Path]
    ) -> AsyncIterator[VllmEngine]:
        modules = (f"a={folders['first']}",)
        engine = await make_engine(
            engine_model, {"max_loras": 2, "max_lora_rank": 8}, lora_modules=modules
        )
        info = await engine.start()
        assert "adapters" in info.features
        yield engine
        await engine.stop()

    async def test_answers_are_those_of_merged_weights(
        self, engine: VllmEngine, folders: dict[str, Path]
    ) -> None:
        files = await resolve_model(str(folders["merged"]), with_weights=True)
        card = files.build_card(block_tokens=16)
        native = await open_engine("native", EngineInputs(Settings(), card, files, SystemClock()))
        await native.start()
        try:
            merged, _ = await answer(native, make_request(PROMPT, TOKENS))
        finally:
            await native.stop()
        own, _ = await answer(engine, ask(engine, ""))
        adapted, _ = await answer(engine, ask(engine, "a"))
        assert adapted == merged != own

    async def test_blocks_are_shared_with_nobody_else_and_predicted(
        self, engine: VllmEngine, folders: dict[str, Path]
    ) -> None:
        assert engine.adapters is not None
        await engine.adapters.load("b", str(folders["second"]))
        await engine.clear_blocks()
        view = engine.ranks[0]
        for first, second in ((0, 0), (64, 64)):
            for name, cached in (("", first), ("a", second), ("b", second)):
                request = ask(engine, name)
                await settled(view)
                assert view.blocks.predict(pack_ids(PROMPT), request.salt) == cached
                assert (await answer(engine, request))[1] == cached
        assert view.blocks.counts["foreign"] == 0

    async def test_other_weights_under_the_same_name_answer_anew(
        self, engine: VllmEngine, folders: dict[str, Path]
    ) -> None:
        assert engine.adapters is not None
        old, (before, _) = ask(engine, "a"), await answer(engine, ask(engine, "a"))
        with pytest.raises(InvalidRequest, match="another LoRA adapter 'a' is loaded"):
            await engine.adapters.load("a", str(folders["second"]))
        await engine.adapters.load("a", str(folders["second"]), replace=True)
        after, cached = await answer(engine, ask(engine, "a"))
        assert cached == 0
        assert after != before
        assert after == (await answer(engine, ask(engine, "b")))[0]
        assert (await answer(engine, old))[0] == before
        await engine.adapters.load("a", str(folders["first"]), replace=True)
        await engine.adapters.load("a", str(folders["second"]), replace=True)
        assert (await answer(engine, ask(engine, "a")))[0] == after

    async def test_an_adapter_that_vllm_refuses_leaves_a_well_engine(
        self, engine: VllmEngine, folders: dict[str, Path]
    ) -> None:
        assert engine.adapters is not None
        with pytest.raises(InvalidRequest, match="rank"):
            await engine.adapters.load("c", str(folders["large"]))
        await engine.adapters.unload("b")
        assert (await answer(engine, ask(engine, ""))) == (await answer(engine, ask(engine, "")))
        assert engine.failure is None


@pytest.fixture
def deployment(
    engine_model: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    runtime_environ: dict[str, str],
) -> Iterator[Deployment]:
    words = ["out=vllm", str(engine_model), "--model-name", "smol", "--allow-lora-updates"]
    words += ["--lora-modules", f"a={folders['first']}", "--max-model-len", "512"]
    arguments = (
        "dtype=float32",
        "enforce_eager=true",
        "block_size=32",
        "num_gpu_blocks_override=64",
    )
    words += [word for argument in arguments for word in ("--engine-arg", argument)]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # two that wait for each other spin
    }
    deployment = Deployment(words, tmp_path, runtime_environ | environ)
    deployment.wait_ready(300)
    yield deployment
    deployment.stop(timeout_s=60)


def test_adapters_are_loaded_and_named_over_http(
    deployment: Deployment, folders: dict[str, Path]
) -> None:
    def complete(model: str) -> tuple[int, Any]:
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8}
        return deployment.post("/v1/completions", body | {"temperature": 0})

    texts = {name: complete(name)[1]["choices"][0]["text"] for name in ("smol", "a")}
    assert texts["a"] != texts["smol"]
    assert complete("b")[0] == 404
    order = {"lora_name": "b", "lora_path": str(folders["second"])}
    status, _ = deployment.post_text("/v1/load_lora_adapter", order)
    assert status == 200
    listed = json.loads(deployment.get("/v1/models")[1])["data"]
    assert {model["id"]: model.get("parent") for model in listed} == {
        "smol": None,
        "a": "smol",
        "b": "smol",
    }
    texts["b"] = complete("b")[1]["choices"][0]["text"]
    assert len(set(texts.values())) == 3
    assert deployment.post_text("/v1/unload_lora_adapter", {"lora_name": "b"})[0] == 200
    status, error = complete("b")
    assert (status, error["error"]["code"]) == (404, "model_not_found")
    assert complete("a")[1]["choices"][0]["text"] == texts["a"]


def test_eight_adapters_loaded_by_request_outlive_the_worker(
    deployment: Deployment, engine_model: Path, tmp_path: Path
) -> None:
    names = [f"n{number}" for number in range(8)]
    for number, name in enumerate(names):
        write_lora(tmp_path / name, engine_model, 10 + number)

    def load(name: str) -> None:
        order = {"lora_name": name, "lora_path": str(tmp_path / name)}
        assert deployment.post_text("/v1/load_lora_adapter", order)[0] == 200

    def unload(name: str) -> None:
        assert deployment.post_text("/v1/unload_lora_adapter", {"lora_name": name})[0] == 200

    def complete(model: str) -> tuple[str, int]:
        body = {"model": model, "prompt": "The capital of France is " * 20, "max_tokens": 8}
        status, answer = deployment.post("/v1/completions", body | {"temperature": 0})
        assert status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    alone = {}
    for name in names:
        load(name)
        alone[name] = complete(name)[0]
        unload(name)
    for name in names:
        load(name)
    together = {name: complete(name) for name in names}
    assert {name: text for name, (text, _) in together.items()} == alone
    assert len(set(alone.values())) == len(names)

    (worker,) = [each for each in deployment.processes() if each["name"] == "worker"]
    os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: json.loads(deployment.get("/health")[1])["workers"] == {"smol": 0})
    until(lambda: json.loads(deployment.get("/health")[1])["workers"] == {"smol": 1}, 300)
    again = {name: complete(name) for name in names}
    assert again == {name: (text, 0) for name, text in alone.items()}  # no block of another one
    assert all(cached for _, cached in map(complete, names))
