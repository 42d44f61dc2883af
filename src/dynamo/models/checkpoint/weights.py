"""Weights of a model as float32 arrays with Hugging Face names, from GGUF or safetensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.llama_config import (
    LlamaConfig,
    config_from_gguf,
    config_from_json,
    rope_divisors,
    tensor_shape,
)
from dynamo.models.checkpoint.safetensors import SafetensorsFolder, weight_files

if TYPE_CHECKING:
    from dynamo.models.checkpoint.quantization import Floats


class ModelWeights(AbstractContextManager["ModelWeights"], ABC):
    """The tensors of a model, read on demand. Close it after the last read."""

    config: LlamaConfig

    @abstractmethod
    def tensor(self, name: str) -> Floats:
        """Return a tensor by its Hugging Face name, `model.layers.0.self_attn.q_proj.weight`.

        The array is a float32 copy in C order. Projections are [out, in], with the rows of q and k
        in rotate_half order. Raises `ModelUnavailable` if the tensor is absent, damaged, or has
        another shape than `config` requires.
        """

    def rope_divisors(self) -> Floats:
        """Return the divisors of rotary frequencies, [head_dim / 2] float32; ones: no scaling."""
        return rope_divisors(self.config)

    @abstractmethod
    def close(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.close()


class SafetensorsWeights(ModelWeights):
    """Weights in a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        if not weight_files(folder):
            raise ModelUnavailable(
                f"{folder} has no weights in safetensors format",
                hint="the mock and echo engines need no weights; native needs model.safetensors",
            )
        self._files = SafetensorsFolder(folder)
        names = self._files.tensors
        _reject_biases(names)
        self.config = config_from_json(folder / "config.json", "lm_head.weight" in names)

    def tensor(self, name: str) -> Floats:
        return _check_shape(self._files.tensor(name), name, self.config)

    def close(self) -> None:
        self._files.close()


class GgufWeights(ModelWeights):
    """Weights in a GGUF file of the llama architecture."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._file.check_tensors()
        _reject_biases(self._file.tensors)
        self.config = config_from_gguf(self._file)

    def tensor(self, name: str) -> Floats:
        stored = _check_shape(self._file.tensor(gguf_tensor_name(name)), name, self.config)
        if ".self_attn.q_proj." in name:
            return _undo_rotary_permutation(stored, self.config.num_heads)
        if ".self_attn.k_proj." in name:
            return _undo_rotary_permutation(stored, self.config.num_kv_heads)
        return stored

    def rope_divisors(self) -> Floats:
        if "rope_freqs.weight" in self._file.tensors:
            return self.tensor("rope_freqs.weight")
        return super().rope_divisors()

    def close(self) -> None:
        self._file.close()


def open_weights(path: Path) -> ModelWeights:
    """Open the weights of a GGUF file or a Hugging Face folder. Raises `ModelUnavailable`."""
    return GgufWeights(path) if path.is_file() else SafetensorsWeights(path)


def _reject_biases(names: Iterable[str]) -> None:
    biases = [name for name in names if name.endswith(".bias")]
    if biases:
        raise ModelUnavailable(
            f"the native engine does not support biases, and the model has {biases[0]}"
        )


def _check_shape(tensor: Floats, name: str, config: LlamaConfig) -> Floats:
    expected = tensor_shape(name, config)
    if tensor.shape != expected:
        raise ModelUnavailable(
            f"{name} has shape {tensor.shape} instead of {expected}, which the model's "
            "configuration requires",
            hint="fetch the model again",
        )
    return tensor


_GGUF_TOP_LEVEL = {
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
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def gguf_tensor_name(name: str) -> str:
    """Return GGUF's name for a Hugging Face tensor name. Unknown names are returned unchanged."""
    if name in _GGUF_TOP_LEVEL:
        return _GGUF_TOP_LEVEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _GGUF_LAYER:
        return name
    return f"blk.{match[1]}.{_GGUF_LAYER[match[2]]}.weight"


def _undo_rotary_permutation(stored: Floats, heads: int) -> Floats:
    """Undo the interleaving of rotary pairs in GGUF: put the halves of each head in a row."""
    import numpy as np

    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)
