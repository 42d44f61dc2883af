# ruff: noqa: RUF001
"""Fixtures that write tiny models in GGUF and safetensors format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.gguf import gguf_bytes
from tests.support.recorded_outputs import FamilyFile, FamilyModel

from dynamo.models.answers.families import find_family

WORDS = (
    "he", "hel", "hell", "hello", "Ġw", "Ġwo", "Ġwor", "Ġworl", "Ġworld", "ĠĠ", "Ċ", "in", "ing",
    "th", "the", "Ġt", "Ġthe", "an", "and", "Ġa", "Ġand", "er", "re", "'s", "Ã©", "ä¸", "ä¸Ń",
)  # fmt: skip
SPECIALS = ("<|end|>", "<|im_start|>", "<|im_end|>")
GENERATION = {"temperature": 0.2, "top_k": 7, "eos_token_id": [2, 0]}


def alphabet() -> list[str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(n if n in printable else next(others)) for n in range(256)]


def merges(words: list[str]) -> list[tuple[str, str]]:
    """Return for each word its first split into two other words."""
    known = set(words)
    pairs = []
    for word in words:
        for cut in range(1, len(word)):
            if word[:cut] in known and word[cut:] in known:
                pairs.append((word[:cut], word[cut:]))
                break
    return pairs


def vocabulary() -> list[str]:
    letters = alphabet()
    return [*SPECIALS, *letters, *(word for word in WORDS if word not in letters)]


def tokenizer_document() -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    words = vocabulary()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": word, "special": True, **flags} for n, word in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                level | {"use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [list(pair) for pair in merges(words[len(SPECIALS) :])],
        },
    }


def safetensors_bytes(arrays: dict[str, np.ndarray], bf16: bool = False) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = (array.view(np.uint32) >> 16).astype("<u2").tobytes() if bf16 else array.tobytes()
        kind = "BF16" if bf16 else {"float32": "F32", "float16": "F16"}[str(array.dtype)]
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    packed = json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + data


CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": len(vocabulary()),
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def hf_arrays() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], 32),
        "model.norm.weight": (32,),
    }
    for layer in range(2):
        layer_shapes = {
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (64, 32),
            "mlp.up_proj": (64, 32),
            "mlp.down_proj": (32, 64),
        }
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()
        }
    return {
        name: chance.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of q or k in the order of llama.cpp's converter."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def gguf_model() -> tuple[dict[str, Any], dict[str, tuple[int, tuple[int, ...], bytes]]]:
    words = vocabulary()
    values = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if word in SPECIALS else 1 for word in words],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges(words[len(SPECIALS) :])],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    tensors = {}
    for name, array in hf_arrays().items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            heads = {"self_attn.q_proj.weight": 4, "self_attn.k_proj.weight": 2}.get(rest)
            data = _permuted(array, heads) if heads else array
            gguf_name = f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"
        else:
            data = array
            gguf_name = "token_embd.weight" if "embed" in name else "output_norm.weight"
        tensors[gguf_name] = (0, data.shape, data.tobytes())
    return values, tensors


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test an empty cache instead of the user's."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "dynamo"


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_document()))
    return path


@pytest.fixture
def edited_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny tokenizer with replaced top-level parts and further added tokens."""

    def write(*extra: str, **parts: Any) -> Path:
        document = tokenizer_document() | parts
        for number, content in enumerate(extra, len(vocabulary())):
            first = document["added_tokens"][0]
            document["added_tokens"].append(first | {"id": number, "content": content})
        path = tmp_path / "edited" / "tokenizer.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document))
        return path

    return write


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return hf_arrays()


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny model as GGUF. Arguments replace values (None: omitted) and tensors."""

    def write(values: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        own_values, own_tensors = gguf_model()
        merged = {k: v for k, v in (own_values | (values or {})).items() if v is not None}
        path = tmp_path / "tiny.gguf"
        path.write_bytes(gguf_bytes(merged, own_tensors if tensors is None else tensors))
        return path

    return write


@pytest.fixture
def write_safetensors() -> Callable[..., None]:
    def write(path: Path, arrays: dict[str, np.ndarray], bf16: bool = False) -> None:
        path.write_bytes(safetensors_bytes(arrays, bf16))

    return write


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A Hugging Face folder without weights."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_document()))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    tokens = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: Any, tiny_model: Path) -> Callable[[str], FamilyModel]:
    """Return a function that makes a model with the markers of a family as special tokens."""

    def make(name: str) -> FamilyModel:
        family = FamilyFile(name, list(find_family(name).markers))
        folder = tmp_path_factory.mktemp(name)
        return FamilyModel(family, folder, tiny_model / "tokenizer.json")

    return make
