"""Facts about a model, from the headers of its files, by which an engine is chosen for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import DynamoError, ModelUnavailable
from dynamo.models.checkpoint.architectures import read_config
from dynamo.models.checkpoint.decoder_config import DecoderConfig
from dynamo.models.checkpoint.gguf import GgufFile
from dynamo.models.checkpoint.safetensors import INDEX_FILE, weight_files
from dynamo.models.checkpoint.weights import open_weights, read_gguf_config
from dynamo.models.embedding_model import is_embedding_folder
from dynamo.models.file_cache import read_json
from dynamo.models.location import locate_model
from dynamo.models.resolve import fetch_source_model

_STORED_BYTES = 2
"""Bytes of a weight in most folders, for those whose files are not here yet."""
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf\Z")


class ModelFacts(msgspec.Struct, frozen=True):
    """A model by its headers. No weights are read.

    - `architecture`: the type that config.json or the GGUF file names.
    - `classes`: the classes of transformers that config.json names.
    - `quantization`: the method by which a folder's weights are packed; "" for none.
    - `stored_bytes`: the size of the weights' files; 0 if it is unknown.
    - `config`: the decoder that the native engine would compute; None for `native_error`.
    - `computes_text`: False for an embedding model that this project serves.
    - `is_builtin`: a model of `wheel_models` that is not here yet; native computes those.
    - `has_weights`: its files have weights, here or on the hub, and not only headers.
    """

    spec: str
    name: str
    is_gguf: bool = False
    architecture: str = ""
    classes: tuple[str, ...] = ()
    quantization: str = ""
    stored_bytes: int = 0
    config: DecoderConfig | None = None
    native_error: DynamoError | None = None
    computes_text: bool = True
    is_builtin: bool = False
    has_weights: bool = True


def read_model_facts(spec: str) -> ModelFacts:
    """Read the headers of a model; see `locate_model` for `spec`. Blocks.

    Of a model of the hub only the small files are fetched. Raises `ModelUnavailable`.
    """
    location = locate_model(spec)
    path = location.path
    if path is None:
        if location.kind == "wheel":
            return ModelFacts(spec, location.name, is_builtin=True)
        path = fetch_source_model(location.source, with_weights=False)
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"{location.name} has no config.json on the hub",
                hint="a repository of GGUF files is served by the name of one of them: "
                f"dynamo pull {location.name}:Q4_K_M",
            )
    if path.is_file():
        return _facts_of_file(spec, location.name, path)
    return _facts_of_folder(spec, location.name, path, is_fetched=location.path is not None)


def _facts_of_file(spec: str, name: str, path: Path) -> ModelFacts:
    parts = [path]
    if match := _PART.search(path.name):
        parts = sorted(path.parent.glob(f"{path.name[: match.start()]}-*-of-*.gguf"))
    with GgufFile(path) as file:
        architecture = str(file.get("general.architecture", ""))
        end = max((tensor.start for tensor in file.tensors.values()), default=0)
        config, error = _native_config(path, file)
    return ModelFacts(
        spec,
        name,
        is_gguf=True,
        architecture=architecture,
        stored_bytes=max(end, sum(part.stat().st_size for part in parts)),
        config=config,
        native_error=error,
        has_weights=end < path.stat().st_size,
    )


def _facts_of_folder(spec: str, name: str, path: Path, *, is_fetched: bool) -> ModelFacts:
    if is_embedding_folder(path):
        return ModelFacts(spec, name, computes_text=False)
    values: dict[str, Any] = {}
    if (path / "config.json").is_file():
        values = read_json(path / "config.json", dict[str, Any])
    files = weight_files(path) if is_fetched else []
    config, error = _native_config(path, None if files else path / "config.json")
    packed = values.get("quantization_config")
    return ModelFacts(
        spec,
        name,
        architecture=str(values.get("model_type", "")),
        classes=_texts(values.get("architectures")),
        quantization=str(packed.get("quant_method", "")) if isinstance(packed, dict) else "",
        stored_bytes=sum(file.stat().st_size for file in files) or _planned_bytes(path, config),
        config=config,
        native_error=error,
        has_weights=bool(files) or not is_fetched,
    )


def _native_config(
    path: Path, header: GgufFile | Path | None
) -> tuple[DecoderConfig | None, DynamoError | None]:
    """Return the model for the native engine, or why it does not compute it. `header`: the file
    that decides this; None: the weights do."""
    try:
        if isinstance(header, GgufFile):
            return read_gguf_config(header), None
        if header is not None:
            return read_config(header, frozenset()), None
        with open_weights(path) as weights:
            return weights.config, None
    except ModelUnavailable as error:
        return None, error


def _planned_bytes(path: Path, config: DecoderConfig | None) -> int:
    """Return the bytes of the weights' files that are not here."""
    if (path / INDEX_FILE).is_file():
        index = read_json(path / INDEX_FILE, dict[str, Any]).get("metadata")
        size = index.get("total_size") if isinstance(index, dict) else 0
        if isinstance(size, int | float) and size > 0:
            return int(size)
    return _STORED_BYTES * config.count_weights() if config else 0


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()
