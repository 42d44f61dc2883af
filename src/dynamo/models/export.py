"""Export of a model as a Hugging Face folder in float32, for engines that read no GGUF file."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.decoder_config import (
    DecoderConfig,
    layer_parts,
    rope_divisors,
    tensor_shape,
)
from dynamo.models.checkpoint.safetensors import SINGLE_FILE
from dynamo.models.checkpoint.weights import ModelWeights, open_weights
from dynamo.models.metadata import ModelMetadata


def export_checkpoint(
    path: Path, tokenizer: Path, metadata: ModelMetadata, folder: Path
) -> list[str]:
    """Write the model at `path` to `folder` and return the names of its tensors.

    `tokenizer` is a tokenizer.json. The folder gets it, config.json, tokenizer_config.json,
    generation_config.json and model.safetensors, the last one complete or not at all. Raises
    `ModelUnavailable` for a model whose rotary frequencies config.json cannot describe.
    """
    with open_weights(path) as weights:
        if not _is_llama(weights.config):
            raise ModelUnavailable(
                f"{path} is no Llama-shaped model, and others are not exported",
                hint="use the folder that the file was made from",
            )
        if not np.allclose(weights.rope_divisors(), rope_divisors(weights.config)):
            raise ModelUnavailable(
                f"{path} scales its rotary frequencies in a way that config.json has no name for"
            )
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
        for name, content in _metadata_files(weights.config, metadata).items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        names = list(_tensor_names(weights.config))
        _write_safetensors(folder / SINGLE_FILE, names, weights)
    return names


def _is_llama(config: DecoderConfig) -> bool:
    """Whether a config.json of type llama describes the whole model."""
    names = ("rope_scaling", "tied")
    sizes = config.__struct_fields__[: config.__struct_fields__.index("rope_scaling")]
    return config == DecoderConfig(**{name: getattr(config, name) for name in (*sizes, *names)})


def _tensor_names(config: DecoderConfig) -> Iterator[str]:
    yield "model.embed_tokens.weight"
    for layer in range(config.num_layers):
        yield from (f"model.layers.{layer}.{part}" for part in layer_parts(config))
    yield "model.norm.weight"
    if not config.tied:
        yield "lm_head.weight"


def _metadata_files(config: DecoderConfig, metadata: ModelMetadata) -> dict[str, dict[str, Any]]:
    end_ids = list(metadata.eos_token_ids)
    generation = msgspec.to_builtins(metadata.generation)
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.context_tokens,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": _rope_scaling(config),
            "tie_word_embeddings": config.tied,
            "eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids,
        },
        "generation_config.json": generation | {"eos_token_id": end_ids},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": metadata.bos_token or None,
            "eos_token": metadata.eos_token or None,
            "model_max_length": metadata.context_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata.chat_template,
        },
    }


_SCALING_FIELDS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor"),
}


def _rope_scaling(config: DecoderConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    described: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        described["original_max_position_embeddings"] = scaling.original_context
    for name in _SCALING_FIELDS.get(scaling.kind, ()):
        if value := getattr(scaling, name):
            described[name] = value
    return described


def _write_safetensors(path: Path, names: list[str], weights: ModelWeights) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        shape = tensor_shape(name, weights.config)
        end = offset + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in names:
            weights.tensor(name).tofile(file)
    partial.replace(path)
