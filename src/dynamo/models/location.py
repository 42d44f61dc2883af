"""What a user's word for a model means, and whether the model is on this host already."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads import default_model, hub

LocationKind = Literal["default", "file", "folder", "hub"]


class ModelLocation(msgspec.Struct, frozen=True):
    """`name`: what the model is called unless the user names it; `path`: where it is; None: where
    it will be is known once it is fetched. `source`: what it came from."""

    kind: LocationKind
    name: str
    source: str
    path: Path | None = None


def locate_model(spec: str) -> ModelLocation:
    """`spec`: "" for the default model, a GGUF file, a folder in Hugging Face's layout, or a hub
    name. Looks at names alone: nothing is read or fetched. Raises ModelUnavailable."""
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
    return ModelLocation("hub", spec, spec)


def check_model_folder(path: Path) -> None:
    """Raises ModelUnavailable for a folder that can be no model."""
    if not (path / "tokenizer.json").is_file():
        raise ModelUnavailable(
            f"{path} holds no tokenizer.json",
            hint="a model folder needs tokenizer.json and config.json (weights for native only)",
        )
