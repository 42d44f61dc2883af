"""Location of a model that a user names: default model, file, folder or hub name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads import default_model, hub

LocationKind = Literal["default", "file", "folder", "hub"]


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

    `spec`: "" for the default model, a GGUF file, a Hugging Face folder, or a hub name.
    """
    if not spec:
        model = default_model.DEFAULT_MODEL
        return ModelLocation(
            "default", model.name, model.requirement, default_model.cached_default_model(model)
        )
    path = Path(spec).expanduser()
    if path.is_file():
        return ModelLocation("file", path.stem, str(path), path)
    if path.is_dir():
        check_model_folder(path)
        return ModelLocation("folder", path.resolve().name, str(path), path)
    if path.suffix == ".gguf" or not hub.is_hub_name(spec):
        raise ModelUnavailable(
            f"there is no file or folder {spec}",
            hint="give a GGUF file, a folder with tokenizer.json, or a hub name",
        )
    hub.check_hub_library(spec)
    return ModelLocation("hub", spec, spec)


def check_model_folder(path: Path) -> None:
    """Raise `ModelUnavailable` for a folder without tokenizer.json."""
    if not (path / "tokenizer.json").is_file():
        raise ModelUnavailable(
            f"{path} holds no tokenizer.json",
            hint="a model folder needs tokenizer.json and config.json (weights for native only)",
        )
