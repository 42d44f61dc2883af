"""GGUF files of every architecture: the native engine answers as llama.cpp does.

The files hold the random models of `scripts/shapes_oracle.py` with the vocabulary of the default
model. Keys of llama.cpp's cache are half precision, so that tokens are compared only where the two
most likely ones are clearly apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.gguf import gguf_bytes
from tests.unit.inference_native.test_shapes import CASES, random_tensor

from dynamo.core.codec import pack_ids
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.llamacpp.engine import LlamaCppEngine
from dynamo.inference.llamacpp.server import ServerSizes
from dynamo.inference.native.runner import NativeRunner
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.weights import open_weights
from dynamo.models.resolve import resolve_model_blocking
from dynamo.testing.fakes import CollectedReply
from dynamo_conformance.engines import ENGINE_CONTEXT

VOCABULARY = 49152
CLEAR_GAP = 0.05
TOKENS = 24
PROMPT = range(300, 380)
TYPES = {  # case -> type in GGUF
    "llama": "llama", "llama-head-dim": "llama", "llama-yarn": "llama", "qwen2": "qwen2",
    "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3",
    "smollm3": "smollm3", "olmo2": "olmo2", "granite": "granite",
}  # fmt: skip
OTHER_FIELDS = {
    "phi3": {"sliding_window": None},  # llama.cpp leaves Phi's window out
    "gemma2": {"final_logit_softcapping": 60.0},  # apart from each other in 49,152 logits, too
}
PAIRED = {"llama", "smollm3", "granite"}
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def gguf_name(name: str, kind: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    path, _, suffix = name.rpartition(".")
    if path in top:
        return f"{top[path]}.{suffix}"
    number, _, part = path.removeprefix("model.layers.").partition(".")
    if part == "post_attention_layernorm" and kind in {"gemma2", "gemma3", "olmo2"}:
        return f"blk.{number}.post_attention_norm.{suffix}"
    return f"blk.{number}.{PARTS[part]}.{suffix}"


def permuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Put rotary pairs side by side, as llama.cpp's converter does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def metadata(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": config["rope_theta"],
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
    }
    scaling = config.get("rope_scaling")
    if scaling:
        values |= {
            "rope.scaling.type": scaling["rope_type"],
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling.get("original_max_position_embeddings"),
        }
    return {f"{kind}.{key}": value for key, value in values.items() if value is not None}


def write_gguf(path: Path, name: str) -> None:
    case, kind = CASES[name], TYPES[name]
    config = case["given"] | OTHER_FIELDS.get(kind, {})
    with GgufFile(resolve_model_blocking("").path) as file:
        names = ("model", "pre", "tokens", "merges", "eos_token_id")
        values = {f"tokenizer.ggml.{key}": file.get(f"tokenizer.ggml.{key}") for key in names}
    values |= {"general.architecture": kind} | metadata(config, kind)
    tensors: dict[str, Any] = {}
    for tensor, sizes in case["tensors"].items():
        by_token = tensor in {"model.embed_tokens.weight", "lm_head.weight"}
        array = random_tensor(tensor, [VOCABULARY, sizes[1]] if by_token else sizes)
        if kind.startswith("gemma") and tensor.endswith("norm.weight"):
            array = array + 1
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        key = heads.get(tensor.split(".")[-2])
        if kind in PAIRED and key:
            array = permuted(array, config[key])
        raw = np.ascontiguousarray(array, np.float32)
        tensors[gguf_name(tensor, kind)] = (0, raw.shape, raw.tobytes())
    path.write_bytes(gguf_bytes(values, tensors))


async def answer(engine: Any, prompt: Sequence[int], tokens: int, top: int = 0) -> CollectedReply:
    stops = StopConditions(max_tokens=tokens, ignore_eos=True)
    reply = CollectedReply()
    request = GenerateRequest(
        "r", "m", pack_ids(prompt), SamplingParams(temperature=0), stops, top_logprobs=top or None
    )
    await engine.generate(request, ENGINE_CONTEXT, reply)
    return reply


@pytest.mark.parametrize("name", TYPES)
async def test_answers_are_those_of_llamacpp(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, name)
    theirs = LlamaCppEngine(
        path, ServerSizes(slots=1, context_tokens=512), vocab_size=VOCABULARY, eos_token_ids=()
    )
    settings = EngineSettings(num_blocks=64, block_size=16, threads=1)
    ours = BatchedEngine(NativeRunner(lambda: open_weights(path), settings, context_tokens=512))
    await theirs.start()
    await ours.start()
    try:
        expected = (await answer(theirs, PROMPT, TOKENS)).ids
        compared = 0
        for step in range(TOKENS):
            reply = await answer(ours, [*PROMPT, *expected[:step]], 1, top=2)
            (extras,) = (extra for extra in reply.extras if extra)
            (_, best), (_, second) = extras[0].top
            if best - second > CLEAR_GAP:
                compared += 1
                assert reply.ids == [expected[step]], f"token {step}"
        assert compared > TOKENS // 2
    finally:
        await theirs.stop()
        await ours.stop()
