"""Sources of models: what a name means, and where its files come from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.shelf.manifest import Manifest, ManifestFile

BUCKET_SCHEMES = ("s3://", "gs://", "az://")
FOLDER_SCHEME = "file://"
SOURCE_SCHEMES = (*BUCKET_SCHEMES, FOLDER_SCHEME)
MAIN = "main"
_PREFIX = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")
_HUB_NAME = re.compile(
    r"(?P<name>\w[\w.-]*(/[\w.-]+)?)(:(?P<quantization>\w+))?(@(?P<revision>[\w./-]+))?"
)
_QUANTIZATION = re.compile(r"[-.]([A-Za-z0-9_]+)(-\d{5}-of-\d{5})?\.gguf\Z")
_SMALL_PATTERNS = ("*.json", "*.jinja")
_IGNORED_PATTERNS = ("original/*", "onnx/*", "*/*.json", ".*")


class SourceUnavailable(ModelUnavailable):
    """A source does not answer, or answers wrongly, now. Another attempt may work."""


class SourceBusy(SourceUnavailable):
    """A source answers 429 or 503. `retry_after_s` says when to ask again."""


class ModelSpec(msgspec.Struct, frozen=True):
    """A model that is to be fetched. `name` is its name on the shelf: a name of the hub, perhaps
    with a quantisation, or a URL."""

    name: str
    revision: str = MAIN

    @property
    def repository(self) -> str:
        """Return the name on the hub, without the quantisation."""
        return self.name if "://" in self.name else self.name.partition(":")[0]

    @property
    def quantization(self) -> str:
        """Return the quantisation of a GGUF file on the hub, or ""."""
        return "" if "://" in self.name else self.name.partition(":")[2]


class Source(Protocol):
    """Where the files of one model come from. All methods block, in any thread."""

    kind: str

    def resolve(self, known: list[Manifest]) -> Manifest:
        """Return the manifest of the commit that the revision means now. Small files of `known`
        manifests of that commit are not read again. Raises `ModelUnavailable`."""

    def read(
        self, manifest: Manifest, file: ManifestFile, span: range, sink: Callable[[bytes], object]
    ) -> None:
        """Pass the bytes `span` of a file to `sink`, or the first of them. Raises `SourceBusy`,
        `SourceUnavailable` if no byte came, and `ModelUnavailable`."""


def parse_spec(text: str) -> ModelSpec | None:
    """Return the model that a text names, or None if it names none that can be fetched."""
    text = _PREFIX.sub("", text, count=1).rstrip("/") if _PREFIX.match(text) else text
    if text.startswith(SOURCE_SCHEMES):
        return ModelSpec(text.rstrip("/") if text.partition("://")[2].strip("/") else text)
    match = _HUB_NAME.fullmatch(text)
    if match is None or text.endswith(".gguf"):
        return None
    quantization = match["quantization"]
    name = f"{match['name']}:{quantization.upper()}" if quantization else match["name"]
    return ModelSpec(name, match["revision"] or MAIN)


def choose_files(spec: ModelSpec, names: list[str], *, with_weights: bool) -> list[str]:
    """Return the files of a repository or folder that make the model. Raises `ModelUnavailable`."""
    if spec.name.endswith(".gguf"):
        wanted = [name for name in names if name == spec.name.rpartition("/")[2]]
    elif spec.quantization:
        wanted = [name for name in names if quantization_of(name) == spec.quantization]
    else:
        wanted = [
            name
            for name in names
            if _matches(name, (*_SMALL_PATTERNS, "*.safetensors"))
            and not _matches(name, _IGNORED_PATTERNS)
        ]
    if not any(name.endswith((".gguf", ".safetensors")) for name in wanted):
        if "://" in spec.name:
            raise ModelUnavailable(
                f"there is no model at {spec.name}",
                hint="name a folder with weights in safetensors, or a file that ends in .gguf",
            )
        if with_weights or not wanted:
            raise _no_weights_error(spec, names)
    if not with_weights:
        wanted = [name for name in wanted if not name.endswith(".safetensors")]
    return sorted(wanted)


def _no_weights_error(spec: ModelSpec, names: list[str]) -> ModelUnavailable:
    kinds = sorted({kind for name in names if (kind := quantization_of(name))})
    kind = spec.quantization
    problem = f"no GGUF file of {kind}" if kind else "no weights in safetensors"
    repository = spec.repository
    hint = ""
    if kinds:
        hint = f"name one of its files: {repository}:{kinds[0]}; it has {', '.join(kinds)}"
    return ModelUnavailable(f"{repository} has {problem}", hint=hint)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def quantization_of(name: str) -> str:
    """Return the quantisation that the name of a GGUF file ends in, or ""."""
    match = _QUANTIZATION.search(name)
    return match[1].upper() if match else ""


class FolderSource:
    """A folder of a slow or shared disk, `file:///FOLDER`, which is copied."""

    kind = "folder"

    def __init__(self, spec: ModelSpec, *, with_weights: bool) -> None:
        self._spec = spec
        self._with_weights = with_weights
        path = Path(spec.name.removeprefix(FOLDER_SCHEME))
        self._folder = path.parent if path.suffix == ".gguf" else path
        if not path.is_absolute():
            raise ModelUnavailable(f"{spec.name} names no folder", hint="write file:///FOLDER")

    def resolve(self, known: list[Manifest]) -> Manifest:
        del known
        try:
            paths = {
                path.relative_to(self._folder).as_posix(): path.stat()
                for path in self._folder.rglob("*")
                if path.is_file()
            }
        except OSError as error:
            raise ModelUnavailable(f"{self._folder} cannot be read: {error.strerror}") from error
        names = choose_files(self._spec, list(paths), with_weights=self._with_weights)
        versions = [(name, paths[name].st_size, paths[name].st_mtime_ns) for name in names]
        return source_manifest(self._spec, versions, with_weights=self._with_weights)

    def read(
        self, manifest: Manifest, file: ManifestFile, span: range, sink: Callable[[bytes], object]
    ) -> None:
        try:
            with (self._folder / file.path).open("rb") as source:
                source.seek(span.start)
                sink(source.read(len(span)))
            now = self.resolve([])
        except OSError as error:
            raise SourceUnavailable(f"{file.path} of {manifest.name}: {error.strerror}") from error
        if now.commit != manifest.commit:
            raise changed_error(manifest)


def source_manifest(
    spec: ModelSpec, versions: Sequence[tuple[str, int, object]], *, with_weights: bool
) -> Manifest:
    """Return the manifest of a source without commits and hashes: the commit is a hash of the
    files' names, sizes and versions."""
    commit = hashlib.sha256(msgspec.json.encode(versions)).hexdigest()[:40]
    files = tuple(ManifestFile(name, size) for name, size, _ in versions)
    return Manifest(spec.name, commit, files, spec.name, with_weights=with_weights)


def changed_error(manifest: Manifest) -> ModelUnavailable:
    """Return the error for files that are not those of the manifest any more."""
    return ModelUnavailable(
        f"{manifest.name} changed while it was fetched",
        hint="repeat the command, which fetches the new version",
    )
