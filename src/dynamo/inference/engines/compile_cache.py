"""Compile caches: what an engine has compiled for its start, kept by identity and shared.

Each identity has a folder in the user's cache, which the engine fills in place of its own ones. A
worker fetches the folder from a store if it has none yet, and stores what its engine has added.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.settings import Settings
from dynamo.inference.engines.arguments import engine_arguments
from dynamo.inference.engines.packages import ENGINE_PACKAGES, package_kind
from dynamo.models.downloads.bucket import SCHEME, open_bucket
from dynamo.models.file_cache import atomic_replacement, cache_dir, file_lock, write_atomically

if TYPE_CHECKING:
    from dynamo.models.resolve import ModelFiles

log = logging.getLogger(__name__)

_SHARED: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
CACHE_VARIABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {"VLLM_CACHE_ROOT": "vllm", **_SHARED},
    "sglang": _SHARED,
}
"""The variables that name the folders of caches, and their folders here, by engine."""
LIBRARIES: Final = ("torch", "triton", "flashinfer-python")
FLAG_NAMES: Final = re.compile(r"(VLLM|SGLANG|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER)_")
OTHER_NAMES: Final = re.compile(r"_(KEY|TOKEN|IP|PORT|PATH|DIR|ROOT|BASE)$|_LOGGING_|_USAGE_")
"""Names of `FLAG_NAMES` that change nothing of what is compiled."""
CARDS: Final = Path("/proc/driver/nvidia/gpus")
CPUS: Final = Path("/proc/cpuinfo")
URL_PARAM: Final = "engine.compile_cache"
TIMEOUT_S: Final = 60.0
CONNECT_TIMEOUT_S: Final = 5.0


class CompileIdentity(msgspec.Struct, frozen=True):
    """All that decides what an engine compiles. `flags`: its arguments, among them parallelism,
    dtype and quantisation. `model`: name, commit and hash of the configuration."""

    model: tuple[str, str, str]
    engine: str
    flags: Mapping[str, Any]
    versions: Mapping[str, str]
    variables: Mapping[str, str]
    processors: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Return the name of the identity."""
        data = msgspec.json.encode(self, enc_hook=repr, order="deterministic")
        return hashlib.sha256(data).hexdigest()


def read_identity(settings: Settings, name: str, path: Path) -> CompileIdentity:
    """Return the identity of an engine of the model `name` in a folder. Blocks."""
    kind = package_kind(settings.engine.kind)
    folder = path.resolve().name
    commit = folder if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", folder) else ""
    config = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    return CompileIdentity(
        (name, commit, config),
        kind,
        engine_arguments(settings),
        {"python": platform.python_version(), **_versions(kind)},
        {
            name: text
            for name, text in os.environ.items()
            if FLAG_NAMES.match(name) and not OTHER_NAMES.search(name)
        },
        (platform.machine(), cpu_features(), *_cards()),
    )


class ArchiveStore(Protocol):
    """Keeps files by name for the workers of many hosts."""

    def get(self, name: str, target: Path) -> None:
        """Fetch a file. Raises `FileNotFoundError` if there is none, and other errors."""

    def put(self, name: str, source: Path) -> None:
        """Store a file, which replaces an older one at once."""


class FolderStore:
    """Files in a folder, for example of a network file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str, target: Path) -> None:
        shutil.copyfile(self._folder / name, target)

    def put(self, name: str, source: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_replacement(self._folder / name) as part:
            shutil.copyfile(source, part)


class BucketStore:
    """Objects below the prefix of a bucket."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def get(self, name: str, target: Path) -> None:
        with target.open("wb") as file:
            for chunk in self._store.get(name).stream():
                file.write(chunk)

    def put(self, name: str, source: Path) -> None:
        self._store.put(name, source)


def open_store(url: str) -> ArchiveStore:
    """Return a store without I/O. Raises `ConfigError`."""
    if url.startswith(SCHEME):
        timeouts = {"timeout_s": TIMEOUT_S, "connect_s": CONNECT_TIMEOUT_S, "retry_s": TIMEOUT_S}
        return BucketStore(open_bucket(url, **timeouts, param=URL_PARAM, without=", or a folder"))
    if "://" in url or not Path(url).is_absolute():
        raise ConfigError(
            f"{url!r} is no store for compile caches",
            hint="give the absolute path of a folder, or s3://BUCKET/PREFIX",
            param=URL_PARAM,
        )
    return FolderStore(Path(url))


class CompileCache:
    """The folder of an identity. Failures of the store cost time, and nothing else."""

    def __init__(self, identity: CompileIdentity, store: ArchiveStore) -> None:
        self._digest = identity.digest
        self._store = store
        self._name = f"{self._digest}.zip"
        root = cache_dir("compiled")
        self.folder = root / self._digest
        self._stored = root / f"{self._digest}.stored"
        self._lock = root / f"{self._digest}.lock"
        self.environment = {
            variable: str(self.folder / part)
            for variable, part in CACHE_VARIABLES[identity.engine].items()
        }

    def fetch(self) -> None:
        """Fetch the folder, unless there is one. Other workers of the host wait. Blocks."""
        with file_lock(self._lock):
            if not self.folder.exists():
                self._try("fetched", self._fetch)
            for path in self.environment.values():
                Path(path).mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        """Store the folder, if the store lacks a part of it. Blocks."""
        with file_lock(self._lock):
            self._try("stored", self._save)

    def _fetch(self) -> int:
        with TemporaryDirectory(dir=self.folder.parent) as name:
            archive, content = Path(name, "archive"), Path(name, "content")
            try:
                self._store.get(self._name, archive)
            except FileNotFoundError:
                return 0
            with zipfile.ZipFile(archive) as zipped:
                if zipped.comment.decode("ascii", "replace") != self._digest:
                    raise zipfile.BadZipFile("the archive is that of another identity")
                zipped.extractall(content)
            content.rename(self.folder)
            write_atomically(self._stored, self._summary())
            return archive.stat().st_size

    def _save(self) -> int:
        summary = self._summary()
        with suppress(FileNotFoundError):
            if self._stored.read_bytes() == summary:
                return 0
        with TemporaryDirectory(dir=self.folder.parent) as name:
            archive = Path(name, "archive")
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as zipped:
                for path in self._files():
                    zipped.write(path, path.relative_to(self.folder))
                zipped.comment = self._digest.encode()
            self._store.put(self._name, archive)
            write_atomically(self._stored, summary)
            return archive.stat().st_size

    def _try(self, done: str, work: Callable[[], int]) -> None:
        fields: dict[str, Any] = {"identity": self._digest[:12]}
        began = time.monotonic()
        try:
            size = work()
        except Exception as error:  # noqa: BLE001 - the engine compiles, as without a store
            reason = error.message if isinstance(error, DynamoError) else str(error)
            log.warning("compile cache not %s", done, extra={"fields": fields | {"error": reason}})
            return
        if size:
            fields |= {"mb": round(size / 1e6, 1), "s": round(time.monotonic() - began, 2)}
            log.info("compile cache %s", done, extra={"fields": fields})

    def _files(self) -> Iterable[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def _summary(self) -> bytes:
        """Return a hash of the names and sizes of the files."""
        sizes = [
            (str(path.relative_to(self.folder)), path.stat().st_size) for path in self._files()
        ]
        return hashlib.sha256(msgspec.json.encode(sizes)).hexdigest().encode()


def open_compile_cache(settings: Settings, files: ModelFiles) -> CompileCache | None:
    """Return the cache of an engine, or None if it has none or no store is set. Blocks. Raises
    `ConfigError`."""
    kind, url = package_kind(settings.engine.kind), settings.engine.compile_cache
    if not url or kind not in CACHE_VARIABLES:
        return None
    return CompileCache(read_identity(settings, files.name, files.path), open_store(url))


def _versions(kind: str) -> dict[str, str]:
    versions = {}
    for name in (*ENGINE_PACKAGES[kind].distributions, *LIBRARIES):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    torch = find_spec("torch")
    if torch is not None and torch.origin:  # its version alone does not tell CUDA's
        text = Path(torch.origin).with_name("version.py").read_text()
        versions |= dict(re.findall(r"(?m)^(cuda|hip|git_version)\b[^=]*= *(.*)$", text))
    return versions


def _cards() -> Iterable[str]:
    """Return the models of the NVIDIA cards."""
    texts = (path.read_text() for path in CARDS.glob("*/information"))
    return sorted({match[1] for text in texts if (match := re.search(r"Model:\s*(.*)", text))})


def cpu_features() -> str:
    """Return a hash of what the processor can do: torch compiles for it, too."""
    try:
        features = re.search(r"(?m)^(?:flags|Features)\s*:(.*)$", CPUS.read_text())
    except OSError:
        return ""
    text = " ".join(sorted(features[1].split())) if features else ""
    return hashlib.sha256(text.encode()).hexdigest()
