"""A tiny embedding model with random weights, and its encoder once more in plain float64."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 24, 2, 4, 40, 64
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"],
]


def write_tiny_bert(folder: Path, *, pooling: str = "mean_tokens", normalised: bool = True) -> Path:
    """Write a folder as sentence-transformers does. Texts have at most 16 tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(6)  # as published folders do; the service ignores it
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "bert",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "vocab_size": len(WORDS),
        "max_position_embeddings": POSITIONS,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 16})
    _write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalised else [])]
    _write_json(folder / "modules.json", [{"type": f"models.{kind}"} for kind in kinds])
    write_safetensors(folder / "model.safetensors", random_weights())
    return folder


def random_weights() -> dict[str, Any]:
    """Return all tensors, by their Hugging Face names."""
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> Any:
        return rng.normal(0, 0.4, shape).astype(np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": draw(len(WORDS), HIDDEN),
        "embeddings.position_embeddings.weight": draw(POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": draw(2, HIDDEN),
        "embeddings.LayerNorm.weight": 1 + draw(HIDDEN),
        "embeddings.LayerNorm.bias": draw(HIDDEN),
    }
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for name, rows, columns in (
            ("attention.self.query", HIDDEN, HIDDEN),
            ("attention.self.key", HIDDEN, HIDDEN),
            ("attention.self.value", HIDDEN, HIDDEN),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", INNER, HIDDEN),
            ("output.dense", HIDDEN, INNER),
        ):
            tensors[f"{layer}.{name}.weight"] = draw(rows, columns)
            tensors[f"{layer}.{name}.bias"] = draw(rows)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            tensors[f"{layer}.{name}.weight"] = 1 + draw(HIDDEN)
            tensors[f"{layer}.{name}.bias"] = draw(HIDDEN)
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write float32 tensors."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def reference_vector(ids: Sequence[int], pooling: str = "mean_tokens") -> Any:
    """Return the vector of one text, not normalised, computed row by row in float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in random_weights().items()}

    def linear(name: str, rows: Any) -> Any:
        return rows @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name: str, rows: Any) -> Any:
        centred = rows - rows.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-12)
        return scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    rows = tensors["embeddings.word_embeddings.weight"][list(ids)]
    rows = rows + tensors["embeddings.position_embeddings.weight"][: len(ids)]
    rows = norm(
        "embeddings.LayerNorm", rows + tensors["embeddings.token_type_embeddings.weight"][0]
    )
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        query, key, value = (
            linear(f"{layer}.attention.self.{part}", rows) for part in ("query", "key", "value")
        )
        mixed = np.empty_like(rows)
        for head in range(HEADS):
            part = slice(head * HIDDEN // HEADS, (head + 1) * HIDDEN // HEADS)
            scores = np.exp(query[:, part] @ key[:, part].T / math.sqrt(HIDDEN / HEADS))
            mixed[:, part] = scores / scores.sum(1, keepdims=True) @ value[:, part]
        attended = linear(f"{layer}.attention.output.dense", mixed)
        rows = norm(f"{layer}.attention.output.LayerNorm", rows + attended)
        inner = linear(f"{layer}.intermediate.dense", rows)
        inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        rows = norm(f"{layer}.output.LayerNorm", rows + linear(f"{layer}.output.dense", inner))
    return rows.mean(0) if pooling == "mean_tokens" else rows[0]


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
