"""A model's weights as float32 arrays under Hugging Face's names, whatever file holds them."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.gguf import GgufFile
from dynamo.models.safetensors import SafetensorsFolder, weight_files

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float32]]

_HF_TYPES = frozenset({"llama", "mistral"})
_GGUF_TYPES = frozenset({"llama"})


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched. `kind`: linear or llama3."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class LlamaConfig(msgspec.Struct, frozen=True):
    """The shape of a Llama-like model. `tied`: the output matrix is the embedding."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope_theta: float
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

    def need(key: str) -> Any:
        value = file.get(f"{kind}.{key}")
        if value is None:
            raise ModelUnavailable(f"{file.path.name} does not tell {kind}.{key}")
        return value

    hidden, heads = need("embedding_length"), need("attention.head_count")
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=file.get(f"{kind}.attention.head_count_kv", heads),
        head_dim=file.get(f"{kind}.attention.key_length", hidden // heads),
        vocab_size=_rows(file, "token_embd.weight"),
        context_tokens=need("context_length"),
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope_theta=file.get(f"{kind}.rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(file, kind),
        tied="output.weight" not in file.tensors,
    )


def config_from_json(path: Path, has_output: bool) -> LlamaConfig:
    """The shape that a Hugging Face config.json tells."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        _supported(found.get("model_type", ""), _HF_TYPES)
        if found.get("sliding_window"):
            raise ModelUnavailable("sliding-window attention is not supported")
        rope = found.get("rope_parameters") or {}
        hidden, heads = found["hidden_size"], found["num_attention_heads"]
        return LlamaConfig(
            hidden_size=hidden,
            intermediate_size=found["intermediate_size"],
            num_layers=found["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=found.get("head_dim") or hidden // heads,
            vocab_size=found["vocab_size"],
            context_tokens=found.get("max_position_embeddings", 2048),
            norm_eps=found.get("rms_norm_eps", 1e-6),
            rope_theta=float(found.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=_json_scaling(found.get("rope_scaling") or rope),
            tied=bool(found.get("tie_word_embeddings", not has_output)) or not has_output,
        )
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelUnavailable(f"{path} is not a usable configuration ({error!r})") from error


def _supported(kind: str, known: frozenset[str]) -> None:
    if kind not in known:
        raise ModelUnavailable(
            f"the native engine does not know the architecture {kind or '(none)'!r}",
            hint=f"it knows {', '.join(sorted(known))}; other models run on the mock engine",
        )


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelUnavailable(f"{file.path.name} holds no tensor {name}")
    return file.tensors[name].shape[0]


def _gguf_scaling(file: GgufFile, kind: str) -> RopeScaling | None:
    scaling = file.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    return _checked_scaling(scaling, {"factor": file.get(f"{kind}.rope.scaling.factor", 1.0)})


def _json_scaling(found: dict[str, Any]) -> RopeScaling | None:
    kind = found.get("rope_type", found.get("type", "default"))
    return None if kind == "default" else _checked_scaling(kind, found)


def _checked_scaling(kind: str, found: dict[str, Any]) -> RopeScaling:
    if kind not in {"linear", "llama3"}:
        raise ModelUnavailable(f"rotary scaling {kind!r} is not supported (linear, llama3 are)")
    return RopeScaling(
        kind,
        float(found["factor"]),
        float(found.get("low_freq_factor", 1.0)),
        float(found.get("high_freq_factor", 4.0)),
        int(found.get("original_max_position_embeddings", 8192)),
    )


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
