"""The architectures that the native engine computes, read from a config.json or a GGUF file.

Each row of `ARCHITECTURES` says what follows from the type alone. The files supply the rest.
Sources: transformers' `modeling_*` of each type; llama.cpp's `llama-model.cpp` for GGUF.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.decoder_config import DecoderConfig, RopeScaling, layer_parts
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.file_cache import read_json

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip


class Architecture(NamedTuple):
    """The parts of a model that its type fixes.

    - `fields`: fields of `DecoderConfig`.
    - `norm_offset`: what the factors of norms in safetensors lack.
    - `gguf_pairs`: GGUF files have rotary pairs side by side.
    - `window_period`: layers with this period attend to all positions, the others to a window.
    - `windows_last`: windows have to be asked for, and only the last layers have them.
    - `defaults`: values of a config.json that may leave them out.
    """

    fields: Mapping[str, Any] = {}
    norm_offset: float = 0.0
    gguf_pairs: bool = False
    window_period: int = 0
    windows_last: bool = False
    defaults: Mapping[str, Any] = {}


_GEMMA = {"norms": "around", "activation": "gelu_tanh", "tied": True}
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
    "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
"""Values that models of text and images leave out."""
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(gguf_pairs=True),
    "mistral": Architecture(gguf_pairs=True),
    "granite": Architecture(gguf_pairs=True),
    "smollm3": Architecture(gguf_pairs=True),
    "qwen2": Architecture(windows_last=True),
    "qwen3": Architecture({"qk_norm": "head"}, windows_last=True),
    "olmo2": Architecture({"qk_norm": "all", "norms": "after"}),
    "phi3": Architecture(),
    "gemma2": Architecture(_GEMMA, norm_offset=1.0, window_period=2),
    "gemma3": Architecture(
        _GEMMA | {"qk_norm": "head"}, norm_offset=1.0, window_period=6, defaults=_GEMMA3_DEFAULTS
    ),
}
"""The architectures by the type in config.json and GGUF files."""
_LAYER_PART = re.compile(r"(?:model\.layers|blk)\.\d+\.(.+)")
_FUSED_PARTS = ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight")
_IGNORED_PARTS = ("self_attn.rotary_emb.inv_freq",)
_TYPE_ALIASES = {"gemma3_text": "gemma3"}
_UNROTATED_PERIOD = 4
"""Every fourth layer of SmolLM3 is not rotated, if the file does not say which are."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_MAX_LAYERS = 10_000
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the Gemma models whose scores are scaled by the hidden size, which GGUF leaves out."""


def architecture_of(kind: Any) -> Architecture:
    """Return the row of a model type. Raises `ModelUnavailable`."""
    architecture = None
    if isinstance(kind, str):
        architecture = ARCHITECTURES.get(_TYPE_ALIASES.get(kind, kind))
    if architecture is None:
        raise ModelUnavailable(
            f"the native engine does not support the architecture {kind or '(none)'!r}",
            hint=f"it computes {', '.join(ARCHITECTURES)}; `dynamo run out=llamacpp` serves other "
            "GGUF files, out=vllm other folders, and out=mock needs no weights",
        )
    return architecture


def read_model_type(path: Path) -> Any:
    """Return the type of the model of text that a config.json describes."""
    raw = read_json(path, dict[str, Any])
    text = raw.get("text_config")
    return (text if isinstance(text, dict) else raw).get("model_type")


def read_config(source: Path | GgufFile, names: frozenset[str]) -> DecoderConfig:
    """Read a config.json or the metadata of a GGUF file. `names`: Hugging Face's names of the
    checkpoint's tensors. Raises `ModelUnavailable`."""
    path = source if isinstance(source, Path) else source.path
    try:
        if isinstance(source, Path):
            values = _values_from_json(source, names)
        else:
            values = _values_from_gguf(source, names)
        config = msgspec.convert(values, DecoderConfig)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelUnavailable(f"{path.name} does not describe a usable model: {error}") from error
    _check_config(config, names, path)
    return config


def _check_config(config: DecoderConfig, names: frozenset[str], path: Path) -> None:
    """Refuse what would be computed wrongly: odd heads, and layers with parts of another kind."""
    if config.num_heads % config.num_kv_heads or config.head_dim % 2 or config.rotary_dim % 2:
        raise ModelUnavailable(f"{path.name} has an unsupported number or size of heads")
    scaling = config.rope_scaling
    for factors in (scaling.short_factor, scaling.long_factor) if scaling else ():
        if factors and len(factors) != (config.rotary_dim or config.head_dim) // 2:
            raise ModelUnavailable(f"{path.name} has {len(factors)} rotary factors")
    parts = {match[1] for name in names if (match := _LAYER_PART.match(name))}
    if other := sorted(parts.difference(layer_parts(config), _FUSED_PARTS, _IGNORED_PARTS)):
        raise ModelUnavailable(
            f"the native engine does not compute {other[0]}, which the layers of {path.name} have",
            hint="out=llamacpp serves GGUF files of other shapes, and out=vllm folders",
        )


def _values_from_json(path: Path, names: frozenset[str]) -> dict[str, Any]:
    raw = read_json(path, dict[str, Any])
    if isinstance(raw.get("text_config"), dict):
        raw |= raw["text_config"]
    kind = read_model_type(path)
    architecture = architecture_of(kind)
    # The file wins over the architecture's defaults.
    raw, fields = {**architecture.defaults, **raw}, {**architecture.fields}
    if isinstance(packed := raw.get("quantization_config"), dict) and packed:
        raise ModelUnavailable(
            f"the native engine does not read weights that {packed.get('quant_method')} has packed",
            hint="out=vllm serves such folders; native reads F32, F16, BF16 and packed GGUF files",
        )
    activation = raw.get("hidden_activation") or raw.get("hidden_act")
    if activation is not None and "activation" not in fields:
        if activation not in _ACTIVATIONS:
            raise ModelUnavailable(
                f"the activation {activation!r} is not supported",
                hint="out=vllm serves folders of other shapes",
            )
        fields["activation"] = _ACTIVATIONS[activation]
    # Names differ between architectures and between versions of transformers.
    rope, local_rope = _rope_parameters(raw, path)
    heads, tied = raw.get("num_attention_heads"), raw.get("tie_word_embeddings")
    head_dim = raw.get("head_dim") or _divide(raw.get("hidden_size"), heads)
    layers = _check_layers(raw.get("num_hidden_layers"))
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1
    fields |= {
        "hidden_size": raw.get("hidden_size"),
        "intermediate_size": raw.get("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "vocab_size": raw.get("vocab_size"),
        "context_tokens": raw.get("max_position_embeddings", 2048),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        "local_rope_theta": local_rope.get("rope_theta") or raw.get("rope_local_base_freq") or 0.0,
        "rope_scaling": _scaling_from_json(rope, raw),
        "biases": _find_biases(names),
        "windows": _windows_from_json(raw, architecture, layers),
        "unrotated": _unrotated_layers(kind, layers, raw.get("no_rope_layers")),
    }
    # Only a part of a head may be rotated. Names of tensors show tied weights without the key.
    if isinstance(head_dim, int) and share != 1:
        fields["rotary_dim"] = int(head_dim * share)
    if tied is not None or "tied" not in fields:
        fields["tied"] = "lm_head.weight" not in names if tied is None else tied
    return fields | _scales_from_json(raw, str(kind))


def _check_layers(layers: Any) -> Any:
    """Return a number of layers, of which each gets a window. Raises `ValueError`."""
    if isinstance(layers, int) and not 0 < layers <= _MAX_LAYERS:
        raise ValueError(f"it has {layers} layers, and 1 to {_MAX_LAYERS:,} are supported")
    return layers


def _scales_from_json(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the scales and bounds of Gemma's and Granite's models."""
    scales: dict[str, Any] = {
        "query_scale": raw.get("attention_multiplier") or 0.0,
        "embedding_scale": raw.get("embedding_multiplier") or 1.0,
        "residual_scale": raw.get("residual_multiplier") or 1.0,
        "logit_scale": 1.0 / (raw.get("logits_scaling") or 1.0),
        "attention_softcap": raw.get("attn_logit_softcapping") or 0.0,
        "logit_softcap": raw.get("final_logit_softcapping") or 0.0,
    }
    if kind.startswith("gemma"):
        scales["embedding_scale"] = math.sqrt(raw.get("hidden_size") or 1)
        scales["query_scale"] = (raw.get("query_pre_attn_scalar") or 256) ** -0.5
    return scales


def _rope_parameters(raw: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary parameters of layers that attend to all positions, and to a window."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelUnavailable(f"{path.name} does not describe a usable model: rope {rope!r}")
    everywhere, local = rope.get("full_attention"), rope.get("sliding_attention")
    if isinstance(everywhere, dict):
        return everywhere, local if isinstance(local, dict) else {}
    return rope, {}


def _scaling_from_json(rope: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in {"default", None}:
        return None
    kind = "longrope" if kind == "su" else kind  # Phi-3's name for it in 2024
    names = RopeScaling.__struct_fields__
    if kind == "longrope" and not (rope.get("short_factor") and rope.get("long_factor")):
        raise ValueError("longrope without its factors")
    scaling = {name: rope[name] for name in names if rope.get(name)} | {"kind": kind}
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scaling["attention_factor"] = _mscale(rope, "mscale") / _mscale(rope, "mscale_all_dim")
    original = rope.get("original_max_position_embeddings") or raw.get(
        "original_max_position_embeddings"
    )
    if original is None and kind in {"yarn", "dynamic", "longrope"}:
        original = raw.get("max_position_embeddings", 2048)
    return scaling | ({"original_context": original} if original else {})


def _mscale(rope: dict[str, Any], name: str) -> float:
    return float(0.1 * rope[name] * math.log(max(rope.get("factor") or 1, 1)) + 1.0)


def _windows_from_json(
    raw: dict[str, Any], architecture: Architecture, layers: Any
) -> tuple[int, ...]:
    window, types = raw.get("sliding_window"), raw.get("layer_types")
    if isinstance(types, list) and (other := [t for t in types if t not in _LAYER_TYPES]):
        raise ValueError(f"layers of the type {other[0]!r} are not supported")
    if not isinstance(window, int) or not isinstance(layers, int):
        return ()
    if not raw.get("use_sliding_window", not architecture.windows_last):
        return ()
    if window >= raw.get("max_position_embeddings", 2048):
        return ()
    if isinstance(types, list) and len(types) == layers:
        return tuple(window if name == "sliding_attention" else 0 for name in types)
    period = raw.get("sliding_window_pattern") or architecture.window_period
    first = raw.get("max_window_layers", 28) if architecture.windows_last else 0
    return _periodic_windows(layers, window, period, first)


def _periodic_windows(layers: int, window: int, period: int, first: int = 0) -> tuple[int, ...]:
    """Return the windows of layers of which each `period`-th one has none, nor those before
    `first`."""
    return tuple(
        0 if layer < first or (period and (layer + 1) % period == 0) else window
        for layer in range(layers)
    )


def _unrotated_layers(kind: Any, layers: Any, rotated: Any = None) -> tuple[int, ...]:
    if kind != "smollm3" or not isinstance(layers, int):
        return ()
    if isinstance(rotated, list) and len(rotated) == layers:
        return tuple(layer for layer in range(layers) if not rotated[layer])
    return tuple(range(_UNROTATED_PERIOD - 1, layers, _UNROTATED_PERIOD))


def _find_biases(names: frozenset[str]) -> tuple[str, ...]:
    """Return the projections of attention that have a bias."""
    biased = {name.split(".")[-2] for name in names if name.endswith(".bias")}
    return tuple(name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if name in biased)


def _values_from_gguf(file: GgufFile, names: frozenset[str]) -> dict[str, Any]:
    kind = file.get("general.architecture", "")
    fields = {**architecture_of(kind).fields}

    def get(key: str, default: Any = None) -> Any:
        value = file.get(f"{kind}.{key}", default)
        return value[0] if isinstance(value, list) and len(set(value)) == 1 else value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    layers = _check_layers(get("block_count"))
    head_dim = get("attention.key_length") or _divide(hidden, heads)
    embedding = file.tensors.get("token_embd.weight")
    window, period = get("attention.sliding_window"), architecture_of(kind).window_period
    if isinstance(window, int) and isinstance(layers, int) and window < get("context_length", 0):
        fields["windows"] = _periodic_windows(layers, window, period)
    fields |= {
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0] if embedding else None,
        "context_tokens": get("context_length"),
        "norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling_from_gguf(get, names),
        "tied": "lm_head.weight" not in names,
        "biases": _find_biases(names),
        "unrotated": _unrotated_layers(kind, layers),
        "query_scale": get("attention.scale", 0.0),
        "embedding_scale": get("embedding_scale", 1.0),
        "residual_scale": get("residual_scale", 1.0),
        "logit_scale": 1.0 / get("logit_scale", 1.0),
        "attention_softcap": get("attn_logit_softcapping", 0.0),
        "logit_softcap": get("final_logit_softcapping", 0.0),
    }
    rotary_dim = get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        fields["rotary_dim"] = rotary_dim
    if kind == "gemma3":
        fields["local_rope_theta"] = get("rope.freq_base_swa", 10000.0)
    if kind in _LARGEST_GEMMA_LAYERS and isinstance(hidden, int):
        fields["embedding_scale"] = math.sqrt(hidden)
        if layers == _LARGEST_GEMMA_LAYERS[kind] and isinstance(heads, int):
            fields["query_scale"] = (hidden / heads) ** -0.5
    return fields


def _scaling_from_gguf(get: Any, names: frozenset[str]) -> dict[str, Any] | None:
    """Return the scaling of rotary frequencies. Factors for each pair are tensors of the file."""
    kind = get("rope.scaling.type", "none")
    original = get("rope.scaling.original_context_length") or get("context_length")
    scaling = {"original_context": original} if original else {}
    if "rope_factors_long.weight" in names:
        return scaling | {
            "kind": "longrope",
            "attention_factor": get("rope.scaling.attn_factor", 0),
        }
    if kind == "none":
        return None
    return scaling | {"kind": kind, "factor": get("rope.scaling.factor")}


def _divide(whole: Any, parts: Any) -> Any:
    if isinstance(whole, int) and isinstance(parts, int) and parts > 0:
        return whole // parts
    return None
