"""A tiny Llama with random weights, and a reference forward pass in its simplest form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.settings.schema import EngineSettings
from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.tiers.opening import tier_opener
from dynamo.models.checkpoint.weights import ModelWeights, open_weights
from dynamo.models.grammar.matcher import GrammarCompiler

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    header, data, offset = {}, b"", 0
    for name, tensor in tensors.items():
        raw = tensor.astype(np.float32).tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        data += raw
        offset += len(raw)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def write_tiny_llama(folder: Path, *, tied: bool) -> Path:
    rng = np.random.default_rng(7)
    hidden, inner, vocab = 48, 96, 320
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(2):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}self_attn.q_proj.weight": (48, hidden),
            f"{name}self_attn.k_proj.weight": (16, hidden),
            f"{name}self_attn.v_proj.weight": (16, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, 48),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
        }
    write_safetensors(
        folder / "model.safetensors",
        {
            name: rng.normal(1 if len(shape) == 1 else 0, 0.3, shape)
            for name, shape in shapes.items()
        },
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    return folder


@pytest.fixture(scope="session", params=["tied", "untied"])
def tiny_llama(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_llama(folder, tied=request.param == "tied")


Logits = np.ndarray[Any, np.dtype[np.float64]]


class ReferenceLlama:
    """Llama in float64: a single sequence, all positions computed from the start."""

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights
        self.config = weights.config

    def logits(self, ids: list[int]) -> Logits:
        """Return the logits, [positions, vocabulary]."""
        embedding = self.tensor("model.embed_tokens")
        rows = embedding[ids]
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}."
            rows = rows + self.attention(name, self.norm(rows, f"{name}input_layernorm"))
            normal = self.norm(rows, f"{name}post_attention_layernorm")
            gate = normal @ self.tensor(f"{name}mlp.gate_proj").T
            up = normal @ self.tensor(f"{name}mlp.up_proj").T
            rows = rows + (gate / (1 + np.exp(-gate)) * up) @ self.tensor(f"{name}mlp.down_proj").T
        head = embedding if self.config.tied else self.tensor("lm_head")
        return self.norm(rows, "model.norm") @ head.T

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Return the next `count` tokens. Each must be clearly the best."""
        tokens: list[int] = []
        for _ in range(count):
            last = self.logits(ids + tokens)[-1]
            second, best = np.argsort(last)[-2:]
            assert last[best] - last[second] > 1e-4, "a near tie: choose another prompt"
            tokens.append(int(best))
        return tokens

    def tensor(self, name: str) -> Logits:
        return self.weights.tensor(f"{name}.weight").astype(np.float64)

    def norm(self, rows: Logits, name: str) -> Logits:
        mean = (rows**2).mean(-1, keepdims=True)
        return rows / np.sqrt(mean + self.config.norm_eps) * self.tensor(name)

    def attention(self, name: str, normal: Logits) -> Logits:
        config, length = self.config, len(normal)

        def heads(part: str, count: int) -> Logits:
            projected = normal @ self.tensor(f"{name}self_attn.{part}").T
            return projected.reshape(length, count, config.head_dim).swapaxes(0, 1)

        group = config.num_heads // config.num_kv_heads
        query = self.rotated(heads("q_proj", config.num_heads))
        key = self.rotated(heads("k_proj", config.num_kv_heads)).repeat(group, 0)
        value = heads("v_proj", config.num_kv_heads).repeat(group, 0)
        scores = query @ key.swapaxes(1, 2) / np.sqrt(config.head_dim)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value
        return mixed.swapaxes(0, 1).reshape(length, -1) @ self.tensor(f"{name}self_attn.o_proj").T

    def rotated(self, heads: Logits) -> Logits:
        half = self.config.head_dim // 2
        steps = self.config.rope_theta ** (-np.arange(half) / half)
        angles = np.arange(heads.shape[1])[:, None] * steps / self.weights.rope_divisors()
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.fixture(scope="session")
def reference_llama(tiny_llama: Path) -> ReferenceLlama:
    return ReferenceLlama(open_weights(tiny_llama))


MakeEngine = Callable[..., BatchedEngine]


@pytest.fixture
def make_engine(tiny_llama: Path) -> MakeEngine:
    """Return `make_engine(num_blocks=..., ...)`, which takes engine settings by name, and those of
    the section `cache` as `cache`."""

    def make(
        cache: CacheSettings = NO_TIERS, grammars: GrammarCompiler | None = None, **settings: Any
    ) -> BatchedEngine:
        engine_settings = EngineSettings(
            **({"threads": 2, "num_blocks": 64, "block_size": 4} | settings)
        )
        runner = NativeRunner(lambda: open_weights(tiny_llama), engine_settings, cache=cache)
        return BatchedEngine(
            runner,
            prefix_caching=engine_settings.prefix_caching,
            open_tiers=tier_opener(cache, engine_settings, SystemClock()),
            grammars=grammars,
        )

    return make


MakeRequest = Callable[..., GenerateRequest]


@pytest.fixture
def make_request() -> MakeRequest:
    """Return `make_request(ids, max_tokens, **fields of GenerateRequest)`. Sampling is greedy by
    default."""

    def make(ids: list[int], max_tokens: int, **fields: Any) -> GenerateRequest:
        stops = fields.pop("stops", StopConditions(max_tokens=max_tokens, ignore_eos=True))
        sampling = fields.pop("sampling", SamplingParams(temperature=0))
        return GenerateRequest("r", "tiny", pack_ids(ids), sampling, stops, **fields)

    return make
