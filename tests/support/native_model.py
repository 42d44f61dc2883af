"""A model of the native engine with a tokenizer and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tests.conftest import write_tiny_model
from tests.unit.inference_native.conftest import write_safetensors


def write_native_model(folder: Path) -> Path:
    """Write a model of two layers to a new folder."""
    write_tiny_model(folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocabulary, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}self_attn.q_proj.weight": (64, 64),
            f"{name}self_attn.k_proj.weight": (32, 64),
            f"{name}self_attn.v_proj.weight": (32, 64),
            f"{name}self_attn.o_proj.weight": (64, 64),
            f"{name}mlp.gate_proj.weight": (128, 64),
            f"{name}mlp.up_proj.weight": (128, 64),
            f"{name}mlp.down_proj.weight": (64, 128),
            f"{name}input_layernorm.weight": (64,),
            f"{name}post_attention_layernorm.weight": (64,),
        }
    rng = np.random.default_rng(3)
    tensors = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
