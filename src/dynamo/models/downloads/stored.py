"""Fetched models on this machine: on the shelf, and in the cache of the hub's own client, which is
only read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dynamo.models.downloads.hub import hub_home
from dynamo.models.downloads.sources import ModelSpec, quantization_of
from dynamo.models.shelf.shelf import Shelf

_INDEX = "model.safetensors.index.json"


def find_stored(spec: ModelSpec, *, with_weights: bool = True) -> Path | None:
    """Return the folder or GGUF file of a model that is whole on this machine. Blocks."""
    model = Shelf().find(spec.name, spec.revision, with_weights=with_weights)
    if model is not None:
        return model.path
    if "://" in spec.name:
        return None
    folder = _hub_cache() / f"models--{spec.repository.replace('/', '--')}"
    with suppress(OSError):
        commit = spec.revision
        if (folder / "refs" / commit).is_file():
            commit = (folder / "refs" / commit).read_text().strip()
        return _find_in_snapshot(folder / "snapshots" / commit, spec, with_weights=with_weights)
    return None


def cached_models() -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of the models in the cache of the hub's own client. Blocks."""
    for folder in sorted(_hub_cache().glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        sizes: dict[str, int] = {}
        for path in (folder / "snapshots").glob("*/**/*"):
            kind = quantization_of(path.name)
            if path.suffix in {".gguf", ".safetensors"} and path.is_file():
                full = f"{name}:{kind}" if kind else name
                sizes[full] = sizes.get(full, 0) + path.stat().st_size
        yield from sizes.items()


def _find_in_snapshot(folder: Path, spec: ModelSpec, *, with_weights: bool) -> Path | None:
    if spec.quantization:
        paths = sorted(folder.rglob("*.gguf")) if folder.is_dir() else []
        files = [path for path in paths if quantization_of(path.name) == spec.quantization]
        return files[0] if files and all(path.exists() for path in files) else None
    needed = {"config.json", "tokenizer.json"}
    if with_weights:
        needed.add("model.safetensors")
        if (folder / _INDEX).is_file():
            needed.remove("model.safetensors")
            needed |= set(json.loads((folder / _INDEX).read_bytes()).get("weight_map", {}).values())
    return folder if all((folder / name).is_file() for name in needed) else None


def _hub_cache() -> Path:
    """Return the folder of the hub's own client, which need not exist."""
    named = os.environ.get("HF_HUB_CACHE")
    return Path(named).expanduser() if named else hub_home() / "hub"
