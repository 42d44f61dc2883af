"""A model's weights as float32 arrays under Hugging Face's names, whatever file holds them."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.gguf import GgufFile
from dynamo.models.safetensors import SafetensorsFolder, weight_files

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float32]]

_HF_TYPES = frozenset({"llama", "mistral"})
_GGUF_TYPES = frozenset({"llama"})


_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched."""

    kind: Literal["linear", "llama3"]
    factor: _Positive
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: _Count = 8192


class LlamaConfig(msgspec.Struct, frozen=True):
    """The shape of a Llama-like model. `tied`: the output matrix is the embedding."""

    hidden_size: _Count
    intermediate_size: _Count
    num_layers: _Count
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    context_tokens: _Count
    norm_eps: float
    rope_theta: _Positive
    rope_scaling: RopeScaling | None = None
    tied: bool = False


class Weights(ABC):
    """One model's tensors, read when asked for. Close it when all is read."""

    config: LlamaConfig

    @abstractmethod
    def tensor(self, name: str) -> Floats:
        """A tensor by its Hugging Face name (`model.layers.0.self_attn.q_proj.weight`): float32,
        C order, own memory; projections are [out, in]; q and k rows in rotate_half order.

        Raises ModelUnavailable when absent or damaged.
        """

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def rope_divisors(self) -> Floats:
        """What each of the head_dim/2 rotary frequencies is divided by (ones: no scaling)."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SafetensorsWeights(Weights):
    """A Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        if not weight_files(folder):
            raise ModelUnavailable(
                f"{folder} holds no weights in safetensors format",
                hint="the mock and echo engines need none; native needs model.safetensors",
            )
        self._files = SafetensorsFolder(folder)
        self.config = config_from_json(
            folder / "config.json", "lm_head.weight" in self._files.names
        )

    def __contains__(self, name: object) -> bool:
        return name in self._files.names

    def tensor(self, name: str) -> Floats:
        return self._files.tensor(name)

    def rope_divisors(self) -> Floats:
        return _divisors(self.config)

    def close(self) -> None:
        self._files.close()


class GgufWeights(Weights):
    """A GGUF file of the llama architecture."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.config = config_from_gguf(self._file)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and gguf_name(name) in self._file.tensors

    def tensor(self, name: str) -> Floats:
        stored = self._file.tensor(gguf_name(name))
        if ".self_attn.q_proj." in name:
            return _unpermuted(stored, self.config.num_heads)
        if ".self_attn.k_proj." in name:
            return _unpermuted(stored, self.config.num_kv_heads)
        return stored

    def rope_divisors(self) -> Floats:
        if "rope_freqs.weight" in self._file.tensors:
            return self._file.tensor("rope_freqs.weight")
        return _divisors(self.config)

    def close(self) -> None:
        self._file.close()


def open_weights(path: Path) -> Weights:
    """The weights in a GGUF file or a Hugging Face folder. Raises ModelUnavailable."""
    return GgufWeights(path) if path.is_file() else SafetensorsWeights(path)


_GGUF_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
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
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """GGUF's name for a Hugging Face tensor name; unknown names stay."""
    if name in _GGUF_OUTER:
        return _GGUF_OUTER[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _GGUF_LAYER:
        return name
    return f"blk.{found[1]}.{_GGUF_LAYER[found[2]]}.{found[3]}"


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """The shape that a GGUF file's metadata tells."""
    kind = file.get("general.architecture", "")
    _supported(kind, _GGUF_TYPES)
    heads = file.get(f"{kind}.attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    scaling = file.get(f"{kind}.rope.scaling.type", "none")
    found = {
        "hidden_size": file.get(f"{kind}.embedding_length"),
        "intermediate_size": file.get(f"{kind}.feed_forward_length"),
        "num_layers": file.get(f"{kind}.block_count"),
        "num_heads": heads,
        "num_kv_heads": file.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": file.get(f"{kind}.attention.key_length"),
        "vocab_size": embedding.shape[0] if embedding else None,
        "context_tokens": file.get(f"{kind}.context_length"),
        "norm_eps": file.get(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get(f"{kind}.rope.freq_base", 10000.0),
        "tied": "output.weight" not in file.tensors,
    }
    if scaling != "none":
        factor = file.get(f"{kind}.rope.scaling.factor")
        found["rope_scaling"] = {"kind": scaling, "factor": factor}
    return _config(found, file.path)


def config_from_json(path: Path, has_output: bool) -> LlamaConfig:
    """The shape that a Hugging Face config.json tells."""
    try:
        said = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error
    _supported(said.get("model_type", ""), _HF_TYPES)
    if said.get("sliding_window"):
        raise ModelUnavailable("sliding-window attention is not supported")
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    heads = said.get("num_attention_heads")
    found = {
        "hidden_size": said.get("hidden_size"),
        "intermediate_size": said.get("intermediate_size"),
        "num_layers": said.get("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": said.get("num_key_value_heads") or heads,
        "head_dim": said.get("head_dim"),
        "vocab_size": said.get("vocab_size"),
        "context_tokens": said.get("max_position_embeddings", 2048),
        "norm_eps": said.get("rms_norm_eps", 1e-6),
        "rope_theta": said.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "rope_scaling": _json_scaling(rope),
        "tied": said.get("tie_word_embeddings") is True or not has_output,
    }
    return _config(found, path)


def _config(found: dict[str, Any], path: Path) -> LlamaConfig:
    hidden, heads = found["hidden_size"], found["num_heads"]
    if found["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        found["head_dim"] = hidden // heads
    try:
        config = msgspec.convert(found, LlamaConfig)
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"{path.name} does not describe a usable model: {error}") from error
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelUnavailable(f"{path.name} has heads that do not divide")
    return config


def _supported(kind: Any, known: frozenset[str]) -> None:
    if kind not in known:
        raise ModelUnavailable(
            f"the native engine does not know the architecture {kind or '(none)'!r}",
            hint=f"it knows {', '.join(sorted(known))}; other models run on the mock engine",
        )


def _json_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor")
    found = {"kind": kind} | {name: rope[name] for name in names if name in rope}
    if "original_max_position_embeddings" in rope:
        found["original_context"] = rope["original_max_position_embeddings"]
    return found


def _divisors(config: LlamaConfig) -> Floats:
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
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: keep, 0: divide by the factor
    return (1.0 / ((1.0 - blend) / scaling.factor + blend)).astype(np.float32)


def _unpermuted(stored: Floats, heads: int) -> Floats:
    """GGUF interleaves the rotary pairs of each head; put the halves back in a row."""
    import numpy as np

    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)
