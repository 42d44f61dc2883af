"""Weights of a model as float32 arrays with Hugging Face names, from GGUF or safetensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.architectures import architecture_of, read_config, read_model_type
from dynamo.models.checkpoint.decoder_config import (
    DecoderConfig,
    Rotary,
    attention_factor,
    plain_frequencies,
    rope_divisors,
    tensor_shape,
)
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.quantization import block_layout, copy_floats, widen
from dynamo.models.checkpoint.safetensors import SafetensorsFolder, weight_files

if TYPE_CHECKING:
    from dynamo.models.checkpoint.quantization import Floats, Stored


class ModelWeights(AbstractContextManager["ModelWeights"], ABC):
    """The tensors of a model, read on demand. Close it after the last read."""

    config: DecoderConfig

    def tensor(self, name: str) -> Floats:
        """Return a tensor by its Hugging Face name, `model.layers.0.self_attn.q_proj.weight`.

        The array is a float32 copy in C order. Projections are [out, in], with the rows of q and k
        in rotate_half order; a part of a fused projection has a name of its own, too. Raises
        `ModelUnavailable` if the tensor is absent, damaged, or has another shape than `config`
        requires.
        """
        return copy_floats(self.stored(name))

    def stored(self, name: str) -> Stored:
        """Return a tensor as `tensor` does, but in the number format of the file and, where that is
        possible, not copied: see `read_values`. The caller must not change it."""
        whole, part = self._find_fused(name)
        stored = self._read(whole)
        expected = tensor_shape(whole, self.config)
        if stored.shape != expected:
            raise ModelUnavailable(
                f"{whole} has shape {stored.shape} instead of {expected}, which the model's "
                "configuration requires",
                hint="fetch the model again",
            )
        return stored[part]

    @abstractmethod
    def has_tensor(self, name: str) -> bool:
        """Whether the files have a tensor of this name."""

    @abstractmethod
    def _read(self, name: str) -> Stored:
        """Return a whole tensor of the files, in the order of rotate_half; see `stored`."""

    def rope_divisors(self, context_tokens: int = 0) -> Floats:
        """Return the divisors of rotary frequencies, [rotary_dim / 2] float32, for an engine of
        this context (0: the model's)."""
        return rope_divisors(self.config, context_tokens)

    def rotary(self, context_tokens: int = 0) -> Rotary:
        """Return the rotary embedding of the layers that attend to all positions."""
        base = plain_frequencies(self.config, self.config.rope_theta)
        divisors = self.rope_divisors(context_tokens)
        return Rotary(base / divisors, attention_factor(self.config))

    def _find_fused(self, name: str) -> tuple[str, slice]:
        """Return the name of the stored tensor and the rows of it that `name` is."""
        path, _, kind = name.rpartition(".")
        layer, _, part = path.rpartition(".")
        fused = _FUSED.get(part)
        if fused is None or self.has_tensor(name):
            return name, slice(None)
        whole, place = fused
        if not self.has_tensor(f"{layer}.{whole}.{kind}"):
            return name, slice(None)
        config = self.config
        if whole == "gate_up_proj":
            ends = [0, config.intermediate_size, 2 * config.intermediate_size]
        else:
            queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
            ends = [0, queries, queries + keys, queries + 2 * keys]
        return f"{layer}.{whole}.{kind}", slice(ends[place], ends[place + 1])

    @abstractmethod
    def close(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.close()


_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
"""The projections that may be stored as a part of one tensor, and their place in it."""


class SafetensorsWeights(ModelWeights):
    """Weights in a Hugging Face folder. The tensors of a model of text and images have a prefix."""

    def __init__(self, folder: Path) -> None:
        if not weight_files(folder):
            raise ModelUnavailable(
                f"{folder} has no weights in safetensors format",
                hint="the mock and echo engines need no weights; native needs model.safetensors",
            )
        self._files = SafetensorsFolder(folder)
        self._stored_names = {_plain_name(name): name for name in self._files.tensors}
        names = frozenset(name for name in self._stored_names if name.startswith(_TEXT_PARTS))
        path = folder / "config.json"
        self.config = read_config(path, names)
        self._norm_offset = architecture_of(read_model_type(path)).norm_offset

    def _read(self, name: str) -> Stored:
        import numpy as np

        stored = self._files.stored(self._stored_names.get(name, name))
        if self._norm_offset and name.endswith("norm.weight"):
            return widen(stored) + np.float32(self._norm_offset)
        return stored

    def has_tensor(self, name: str) -> bool:
        return name in self._stored_names

    def close(self) -> None:
        self._files.close()


class GgufWeights(ModelWeights):
    """Weights in a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.config = read_gguf_config(self._file)
        self._file.check_tensors()
        kind = self._file.get("general.architecture", "")
        self._has_pairs = architecture_of(kind).gguf_pairs
        self._stored_names = {hugging_face_name(name, kind): name for name in self._file.tensors}

    def _read(self, name: str) -> Stored:
        stored = self._file.stored(self._stored_names.get(name, name))
        if self._has_pairs and ".self_attn.q_proj." in name:
            return _undo_rotary_permutation(stored, self.config.num_heads)
        if self._has_pairs and ".self_attn.k_proj." in name:
            return _undo_rotary_permutation(stored, self.config.num_kv_heads)
        return stored

    def has_tensor(self, name: str) -> bool:
        return name in self._stored_names

    def rope_divisors(self, context_tokens: int = 0) -> Floats:
        if self.has_tensor("rope_freqs.weight"):
            return self.tensor("rope_freqs.weight")
        scaling = self.config.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            context = context_tokens or self.config.context_tokens
            length = "long" if context > scaling.original_context else "short"
            return self._read(f"rope_factors_{length}.weight")
        return super().rope_divisors(context_tokens)

    def close(self) -> None:
        self._file.close()


def read_gguf_config(file: GgufFile) -> DecoderConfig:
    """Read the description of a model from the header of its file. Raises `ModelUnavailable` for a
    model that native does not compute."""
    parts = file.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ModelUnavailable(
            f"{file.path.name} is one of {parts} files of a model, and native reads models of one",
            hint="out=llamacpp reads models of several files; name the first of them",
        )
    kind = file.get("general.architecture", "")
    architecture_of(kind)
    names = (hugging_face_name(name, kind) for name in file.tensors)
    for info in file.tensors.values():
        block_layout(info.kind)
    return read_config(file, frozenset(names))


def open_weights(path: Path) -> ModelWeights:
    """Open the weights of a GGUF file or a Hugging Face folder. Raises `ModelUnavailable`."""
    return GgufWeights(path) if path.is_file() else SafetensorsWeights(path)


_GGUF_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES_BY_TYPE = {
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
_TEXT_PARTS = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def _plain_name(name: str) -> str:
    """Return the name that a tensor has in a model of text alone."""
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith("lm_head.") else f"model.{rest}"
    return name


def hugging_face_name(name: str, kind: str) -> str:
    """Return Hugging Face's name for the tensor of a GGUF file of this type. Unknown names are
    returned unchanged."""
    part, _, suffix = name.rpartition(".")
    if part in _GGUF_TOP_LEVEL:
        return f"{_GGUF_TOP_LEVEL[part]}.{suffix}"
    match = _LAYER_NAME.fullmatch(name)
    names = _GGUF_LAYER | _GGUF_NAMES_BY_TYPE.get(kind, {})
    if match is None or match[2] not in names:
        return name
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def _undo_rotary_permutation(stored: Stored, heads: int) -> Stored:
    """Undo the interleaving of rotary pairs in GGUF: put the halves of each head in a row."""
    import numpy as np

    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)
