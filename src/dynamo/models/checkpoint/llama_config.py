"""Configuration of Llama-like models, read from a GGUF file or a config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.file_cache import read_json

if TYPE_CHECKING:
    from dynamo.models.checkpoint.quantization import Floats

_HF_ARCHITECTURES = ("llama", "mistral")
_GGUF_ARCHITECTURES = ("llama",)
_ACTIVATIONS = ("silu", "swish")

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class RopeScaling(msgspec.Struct, frozen=True):
    """Scaling of rotary frequencies for long contexts."""

    kind: Literal["linear", "llama3"]
    factor: _Positive
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: _Count = 8192


class LlamaConfig(msgspec.Struct, frozen=True):
    """Dimensions of a Llama-like model. `tied`: the output matrix is the embedding matrix."""

    hidden_size: _Count
    intermediate_size: _Count
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    context_tokens: _Count
    norm_eps: float
    rope_theta: _Positive
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def count_weights(self) -> int:
        """Count the elements of all matrices; vectors are negligible."""
        heads = self.num_heads + self.num_kv_heads  # q and o, k and v
        layer = 2 * heads * self.head_dim + 3 * self.intermediate_size
        vocabulary = self.vocab_size * (1 if self.tied else 2)
        return self.hidden_size * (self.num_layers * layer + vocabulary)


def tensor_shape(name: str, config: LlamaConfig) -> tuple[int, ...]:
    """Return the shape of the tensor with this Hugging Face name; () if it is unknown."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "rope_freqs": (config.head_dim // 2,),
    }
    return shapes.get(name.removesuffix(".weight").rpartition(".")[2], ())


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """Read the configuration from a GGUF file's metadata. Raises `ModelUnavailable`."""
    kind = file.get("general.architecture", "")
    _check_architecture(kind, _GGUF_ARCHITECTURES)
    heads = _uniform(file.get(f"{kind}.attention.head_count"))
    embedding = file.tensors.get("token_embd.weight")
    scaling = file.get(f"{kind}.rope.scaling.type", "none")
    values = {
        "hidden_size": file.get(f"{kind}.embedding_length"),
        "intermediate_size": file.get(f"{kind}.feed_forward_length"),
        "num_layers": file.get(f"{kind}.block_count"),
        "num_heads": heads,
        "num_kv_heads": _uniform(file.get(f"{kind}.attention.head_count_kv", heads)),
        "head_dim": file.get(f"{kind}.attention.key_length"),
        "vocab_size": embedding.shape[0] if embedding else None,
        "context_tokens": file.get(f"{kind}.context_length"),
        "norm_eps": file.get(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get(f"{kind}.rope.freq_base", 10000.0),
        "tied": "output.weight" not in file.tensors,
    }
    if scaling != "none":
        factor = file.get(f"{kind}.rope.scaling.factor")
        values["rope_scaling"] = {"kind": scaling, "factor": factor}
    config = _build_config(values, file.path)
    if file.get(f"{kind}.rope.dimension_count", config.head_dim) != config.head_dim:
        raise _partial_rotary_error()
    return config


def config_from_json(path: Path, has_output: bool) -> LlamaConfig:
    """Read a Hugging Face config.json. Raises `ModelUnavailable`.

    `has_output`: the checkpoint has an output matrix, which decides `tied` if the file does not.
    """
    raw = read_json(path, dict[str, Any])
    _check_architecture(raw.get("model_type", ""), _HF_ARCHITECTURES)
    if raw.get("sliding_window"):
        raise ModelUnavailable("sliding-window attention is not supported")
    if raw.get("hidden_act", "silu") not in _ACTIVATIONS:
        raise ModelUnavailable(f"the activation {raw['hidden_act']!r} is not supported")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelUnavailable(f"{path.name} does not describe a usable model: rope {rope!r}")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1)) != 1:
        raise _partial_rotary_error()
    tied = raw.get("tie_word_embeddings")
    heads = raw.get("num_attention_heads")
    values = {
        "hidden_size": raw.get("hidden_size"),
        "intermediate_size": raw.get("intermediate_size"),
        "num_layers": raw.get("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim"),
        "vocab_size": raw.get("vocab_size"),
        "context_tokens": raw.get("max_position_embeddings", 2048),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": raw.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "rope_scaling": _parse_rope_scaling(rope),
        "tied": not has_output if tied is None else tied,
    }
    return _build_config(values, path)


def _uniform(value: Any) -> Any:
    """Return the one value of a list with an entry for each layer. Other values stay."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _build_config(values: dict[str, Any], path: Path) -> LlamaConfig:
    hidden, heads = values["hidden_size"], values["num_heads"]
    if values["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        values["head_dim"] = hidden // heads
    try:
        config = msgspec.convert(values, LlamaConfig)
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"{path.name} does not describe a usable model: {error}") from error
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelUnavailable(f"{path.name} has an unsupported number or size of heads")
    return config


def _partial_rotary_error() -> ModelUnavailable:
    return ModelUnavailable("partial rotary embeddings are not supported")


def _check_architecture(kind: Any, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ModelUnavailable(
            f"the native engine does not support the architecture {kind or '(none)'!r}",
            hint=f"supported: {', '.join(known)}; other models run on the mock engine",
        )


def _parse_rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor")
    scaling = {"kind": kind} | {name: rope[name] for name in names if name in rope}
    if "original_max_position_embeddings" in rope:
        scaling["original_context"] = rope["original_max_position_embeddings"]
    return scaling


def rope_divisors(config: LlamaConfig) -> Floats:
    """Return the divisors of the rotary frequencies, [head_dim / 2] float32."""
    import numpy as np

    half, scaling = config.head_dim // 2, config.rope_scaling
    if scaling is None:
        return np.ones(half, np.float32)
    if scaling.kind == "linear":
        return np.full(half, scaling.factor, np.float32)
    exponents = np.arange(half, dtype=np.float64) * 2 / config.head_dim
    wavelengths = 2 * math.pi * config.rope_theta**exponents
    turns = scaling.original_context / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: unscaled, 0: divided by the factor
    return (1.0 / ((1.0 - blend) / scaling.factor + blend)).astype(np.float32)
