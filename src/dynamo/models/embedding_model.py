"""The description of an embedding model, from the files of a sentence-transformers folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.file_cache import FileRef, read_json

EMBEDDING_COMPONENT: Final = "embedder"
"""The component of the workers that serve embedding models."""
EMBED_ENDPOINT: Final = "embed"
EMBEDDING_MODEL_TYPES = ("bert",)
SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")
DEFAULT_EMBEDDING_TOKENS = 512

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class EmbeddingModel(msgspec.Struct, frozen=True):
    """An encoder of the BERT shape; the fields without a default have config.json's names.

    `pooling`: the mean over a text's tokens, or its first token. `normalised`: vectors have length
    1. `context_tokens`: tokens of the longest text, with the special ones.
    """

    hidden_size: _Count
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
    num_attention_heads: _Count
    vocab_size: _Count
    layer_norm_eps: float = 1e-12
    pooling: Literal["mean", "cls"] = "mean"
    normalised: bool = False
    context_tokens: int = DEFAULT_EMBEDDING_TOKENS


class EmbeddingCard(msgspec.Struct, frozen=True):
    """Description of a served embedding model, which workers publish and frontends read. `names`:
    its id, then aliases. `created`: Unix time. `weights`: a digest that tells models of one name
    apart."""

    names: tuple[str, ...]
    dimensions: int
    context_tokens: int
    vocab_size: int
    tokenizer: FileRef
    weights: str = ""
    created: int = 0
    source: str = ""

    def is_same_model(self, other: EmbeddingCard) -> bool:
        """Whether both cards describe the same model: their vectors can be compared."""
        return (self.weights, self.dimensions, self.tokenizer.sha256) == (
            other.weights,
            other.dimensions,
            other.tokenizer.sha256,
        )


class EmbedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of the endpoint `embed`: packed token ids of each text, with the special tokens.

    `dimensions`: the elements of a vector to return; 0: all of them.
    """

    texts: list[bytes]
    dimensions: int = 0


def embedding_models_prefix(namespace: str) -> str:
    """Return the key prefix of cards; a worker's card has the key `{prefix}{model}/{instance}`."""
    return f"/{namespace}/embedding_models/"


def is_embedding_folder(folder: Path) -> bool:
    """Whether the config.json of a folder describes an encoder. False without the file."""
    path = folder / "config.json"
    return path.is_file() and read_json(path, dict[str, Any]).get("model_type") in (
        EMBEDDING_MODEL_TYPES
    )


def read_embedding_model(folder: Path) -> EmbeddingModel:
    """Read the files of a folder. Raises `ModelUnavailable` for an encoder of another shape."""
    config = read_json(folder / "config.json", dict[str, Any])
    kind = config.get("model_type")
    if kind not in EMBEDDING_MODEL_TYPES:
        raise ModelUnavailable(
            f"{folder}: {kind!r} is no embedding model that can be served",
            hint=f"supported model types: {', '.join(EMBEDDING_MODEL_TYPES)}",
        )
    for name, supported in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if (value := config.get(name, supported)) != supported:
            raise ModelUnavailable(f"{folder}: {name} {value!r} is not supported, only {supported}")
    limit = _read_optional(folder / "sentence_bert_config.json").get("max_seq_length")
    positions = config.get("max_position_embeddings", DEFAULT_EMBEDDING_TOKENS)
    modules = _read_modules(folder)
    values = {
        **config,
        "pooling": _read_pooling(folder),
        "normalised": "Normalize" in modules,
        "context_tokens": min(limit or positions, positions),
    }
    try:
        return msgspec.convert(values, EmbeddingModel)
    except (msgspec.ValidationError, TypeError) as error:
        raise ModelUnavailable(f"{folder} does not describe a usable model: {error}") from error


def weights_digest(folder: Path) -> str:
    """Return a digest of the size and the first megabyte of each file of weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()


def _read_modules(folder: Path) -> list[str]:
    """Return the kinds of the folder's modules. Raises `ModelUnavailable` for an unknown one."""
    path = folder / "modules.json"
    modules = read_json(path, list[dict[str, Any]]) if path.is_file() else []
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in SUPPORTED_MODULES]:
        raise ModelUnavailable(
            f"{folder}: the module {unknown[0]} is not supported",
            hint=f"supported: {', '.join(SUPPORTED_MODULES)}",
        )
    return kinds


def _read_pooling(folder: Path) -> str:
    modes = _read_optional(folder / "1_Pooling" / "config.json")
    chosen = [name for name, on in modes.items() if name.startswith("pooling_mode_") and on is True]
    if chosen in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    if chosen == ["pooling_mode_cls_token"]:
        return "cls"
    raise ModelUnavailable(
        f"{folder}: the pooling {', '.join(chosen)} is not supported",
        hint="supported: pooling_mode_mean_tokens, pooling_mode_cls_token",
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any]) if path.is_file() else {}
