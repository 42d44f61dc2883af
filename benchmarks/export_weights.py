#!/usr/bin/env python3
"""Write a model as a float32 safetensors folder for other engines.

benchmarks/export_weights.py OUT_DIR [MODEL]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.models.resolve import resolve_model


def hf_names(layers: int) -> list[str]:
    """Return the tensor names of a Llama with tied embeddings."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += [
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    return names + [f"model.layers.{i}.{p}.weight" for i in range(layers) for p in parts]


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write tensors in the safetensors format: header length, JSON header, data."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    head = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, np.float32).tobytes())


async def export(out: Path, model: str) -> None:
    """Read a model and write it to the folder `out`."""
    files = await resolve_model(model)
    weights = files.open_weights()
    config = weights.config
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights.tensor(name) for name in hf_names(config.num_layers)}
    write_safetensors(out / "model.safetensors", tensors)
    shutil.copy(files.build_card().tokenizer.path, out / "tokenizer.json")
    print(
        f"{len(tensors)} tensors in {out}; add config.json and tokenizer_config.json of the model"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("model", nargs="?", default="", help="default: the default model")
    args = parser.parse_args()
    asyncio.run(export(args.folder, args.model))
