"""Fetched models on this machine: those of the hub, in the cache of its client library, and those
of buckets.

A folder is named as on the hub, a GGUF file of a repository `ORGANISATION/NAME:QUANTISATION`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads import bucket, hub

_PREFIX = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")
_PART = r"(-\d{5}-of-\d{5})?"
_QUANTIZATION = re.compile(rf"[-.]([A-Za-z0-9_]+){_PART}\.gguf\Z")


class StoredModel(msgspec.Struct, frozen=True):
    """A model on this machine by the name that `dynamo run` takes, with its size and files."""

    name: str
    size_bytes: int
    files: tuple[Path, ...]


def plain_hub_name(spec: str) -> str:
    """Return a name of the hub without `hf.co/`, or another spec unchanged."""
    return _PREFIX.sub("", spec, count=1).rstrip("/") if _PREFIX.match(spec) else spec


def is_file_name(spec: str) -> bool:
    """Whether `spec` names a GGUF file of a repository by its quantisation."""
    name, colon, quantization = spec.partition(":")
    return bool(colon and quantization.isidentifier() and "/" in name and hub.is_hub_name(name))


def stored_file(spec: str) -> Path | None:
    """Return the GGUF file, or the first of its parts, if it is on this machine."""
    name, _, quantization = spec.partition(":")
    files = (path for repository, path in _cached_files() if repository == name)
    return next((path for path in files if _has_quantization(path.name, quantization)), None)


def stored_models() -> list[StoredModel]:
    """Return the models on this machine that were fetched from the hub and from buckets."""
    models: dict[str, list[Path]] = {}
    for name, path in _cached_files():
        match = _QUANTIZATION.search(path.name)
        models.setdefault(f"{name}:{match[1]}" if match else name, []).append(path)
    for url, path in bucket.cached_files():
        models.setdefault(url, []).append(path)
    return [
        StoredModel(name, sum(path.stat().st_size for path in paths), tuple(paths))
        for name, paths in sorted(models.items())
        if any(path.suffix in {".gguf", ".safetensors"} for path in paths)
    ]


def remove_model(model: StoredModel) -> None:
    """Delete the files of a model, and what the library keeps of them."""
    for path in model.files:
        content = path.resolve()
        path.unlink(missing_ok=True)
        content.unlink(missing_ok=True)


def planned_files(spec: str) -> Sequence[Any]:
    """Return what `fetch` would fetch, with sizes (`DryRunFileInfo`). Raises `ModelUnavailable`."""
    name, patterns = spec.partition(":")[0], _patterns(spec)
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        files: Sequence[Any] = hub.fetch_files(name, patterns, dry_run=True)
    finally:
        enable_progress_bars()
    return files


def fetch(spec: str) -> Path:
    """Fetch a model. A download that was interrupted is resumed. Raises `ModelUnavailable`."""
    folder = Path(hub.fetch_files(spec.partition(":")[0], _patterns(spec)))
    return stored_file(spec) or folder


def _patterns(spec: str) -> list[str]:
    """Return the patterns of the files of a model. Raises `ModelUnavailable` if the repository has
    none of this quantisation, or only GGUF files of which none is named."""
    name, _, quantization = spec.partition(":")
    hub.check_hub_library(name)
    names = hub.list_files(name)
    files = [file for file in names if file.endswith(".gguf")]
    chosen = [file for file in files if _has_quantization(file, quantization)]
    if quantization and chosen:
        return chosen
    if not quantization and any(file.endswith(".safetensors") for file in names):
        return hub.folder_patterns(with_weights=True)
    kinds = sorted({match[1] for file in files if (match := _QUANTIZATION.search(file))})
    problem = f"no GGUF file of {quantization}" if quantization else "no weights in safetensors"
    raise ModelUnavailable(
        f"{name} has {problem}",
        hint=f"name one of its files: {name}:{kinds[0]}; it has {', '.join(kinds)}"
        if kinds
        else "",
    )


def _has_quantization(file: str, quantization: str) -> bool:
    match = _QUANTIZATION.search(file)
    return match is not None and match[1].lower() == quantization.lower()


def _cached_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the newest revision of each repository in the library's cache, with its
    name."""
    if not hub.has_hub_library():
        return
    from huggingface_hub import constants

    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        revisions = sorted(repository.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
        name = repository.name.removeprefix("models--").replace("--", "/")
        for path in sorted(revisions[-1].rglob("*")) if revisions else ():
            if path.is_file():
                yield name, path
