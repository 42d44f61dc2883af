"""The shelf of a user: models by name and commit, a budget, and locks between processes.

`NAME/COMMIT` is the folder of a whole model, `NAME/.COMMIT.part` of one that is being fetched, and
the file `NAME/.REVISION.ref` names the commit of a revision. All is in the user's cache.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.file_cache import (
    ProgressCallback,
    cache_dir,
    file_lock,
    ignore_progress,
    write_atomically,
)
from dynamo.models.shelf.manifest import Manifest, check_manifest, digest_of
from dynamo.models.shelf.partial import (
    PartialModel,
    ShelfUnavailable,
    read_manifest,
    storage_errors,
)

SMALL_FILES = "small"
"""The end of the names of folders without weights."""
_PART = ".part"
_REMOVED = ".removed"
_holds: dict[Path, int] = {}
"""Descriptors of the folders that this process uses, which hold shared locks on them."""


class ShelfModel(msgspec.Struct, frozen=True):
    """A model on the shelf, whole or in part. `path` is what engines open: the folder, or its only
    GGUF file or the first of its parts."""

    manifest: Manifest
    folder: Path
    is_whole: bool

    @property
    def path(self) -> Path:
        """Return the folder, or the GGUF file that the model is."""
        paths = sorted(file.path for file in self.manifest.files)
        is_file = all(path.endswith(".gguf") for path in paths)
        return self.folder / paths[0] if is_file else self.folder

    @property
    def stored_bytes(self) -> int:
        """Return the bytes on the disk."""
        files = (self.folder / file.path for file in self.manifest.files)
        return sum(512 * path.stat().st_blocks for path in files if path.exists())


class Shelf:
    """The models in a folder. Several processes use it at a time. `budget_bytes` 0: no limit."""

    def __init__(self, root: Path | None = None, budget_bytes: int = 0) -> None:
        self._root = root
        self.budget_bytes = budget_bytes

    @property
    def root(self) -> Path:
        """Return the folder, which is created. Raises `ModelUnavailable`."""
        if self._root is None:
            self._root = cache_dir("shelf")
        return self._root

    def find(self, name: str, revision: str, *, with_weights: bool = True) -> ShelfModel | None:
        """Return a whole model, which this process holds from now on, or None. Blocks."""
        folder = self._root or _existing_root()
        if folder is None:
            return None
        folder /= quote(name, safe="")
        for ending in ("",) if with_weights else ("", f"-{SMALL_FILES}"):
            try:
                commit = (folder / _ref_name(revision, ending)).read_text()
            except OSError:
                if not revision.isalnum():
                    continue
                commit = revision + ending  # a commit is its own name
            if (model := self._hold(folder / commit)) is not None:
                return model
        return None

    def models(self) -> list[ShelfModel]:
        """Return all models, whole ones and parts, by name. Blocks."""
        folder = self._root or _existing_root()
        models = []
        for path in sorted(folder.glob("*/*")) if folder else ():
            is_part = path.name.endswith(_PART)
            if not path.is_dir() or (path.name.startswith(".") and not is_part):
                continue
            if (manifest := read_manifest(path)) is not None:
                models.append(ShelfModel(manifest, path, not is_part))
        return models

    @contextmanager
    def lock_model(self, name: str) -> Iterator[bool]:
        """Try to hold the lock of who fetches a model. The value says whether this process has it.
        The lock ends with its process. Raises `ModelUnavailable`."""
        folder = self.root / quote(name, safe="")
        with storage_errors(name, folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            handle = (folder / ".lock").open("a")
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def started(self, name: str) -> list[Manifest]:
        """Return the manifests of a name whose fetch was begun and not ended. Blocks."""
        folders = (self.root / quote(name, safe="")).glob(f".*{_PART}")
        return [manifest for each in folders if (manifest := read_manifest(each)) is not None]

    def progress(self, name: str) -> list[tuple[Manifest, int]]:
        """Return what is being fetched of a name, with the bytes that are here. Blocks."""
        return [
            (model.manifest, min(model.stored_bytes, model.manifest.size_bytes))
            for model in self.models()
            if model.manifest.name == name and not model.is_whole
        ]

    def open_partial(
        self, manifest: Manifest, progress: ProgressCallback = ignore_progress
    ) -> PartialModel:
        """Make room and begin a fetch, or continue one. The caller holds the model's lock. Blocks.
        Raises `ModelUnavailable`."""
        check_manifest(manifest, manifest.source or "the shelf")
        folder = self.root / quote(manifest.name, safe="")
        with storage_errors(manifest.name, folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f".{_folder_name(manifest)}{_PART}"
        with file_lock(self.root / ".lock"):
            here = ShelfModel(manifest, part, is_whole=False).stored_bytes
            self._make_room(manifest, part, here)
            return PartialModel.open(part, manifest, progress)

    def finish(
        self, partial: PartialModel, revision: str, progress: ProgressCallback = ignore_progress
    ) -> ShelfModel:
        """Check a complete model and put it in its place, which this process holds. Blocks. Raises
        `ModelUnavailable`."""
        manifest = partial.finish(progress)
        folder = partial.folder.parent / _folder_name(manifest)
        with storage_errors(manifest.name, folder):
            if folder.exists():
                self._discard(folder)
            partial.folder.rename(folder)
            for part in folder.parent.glob(f".*{_PART}"):  # of other commits, which nobody wants
                shutil.rmtree(part, ignore_errors=True)
            self.name_commit(manifest, revision)
        model = self._hold(folder)
        if model is None:
            raise ModelUnavailable(f"{folder} was removed when it was complete", hint="try again")
        return model

    def name_commit(self, manifest: Manifest, revision: str) -> None:
        """Let a revision mean the commit of a manifest from now on. Blocks."""
        ending = "" if manifest.with_weights else f"-{SMALL_FILES}"
        folder = self.root / quote(manifest.name, safe="")
        write_atomically(folder / _ref_name(revision, ending), _folder_name(manifest).encode())

    def remove(self, model: ShelfModel) -> None:
        """Delete a model. Blocks. Raises `ModelUnavailable` if a process uses it."""
        if not self._try_remove(model):
            raise ModelUnavailable(
                f"{model.manifest.name} is in use by a process of this machine",
                hint="`dynamo ps` lists them",
            )
        with suppress(OSError):
            if not any(path.is_dir() for path in model.folder.parent.iterdir()):
                shutil.rmtree(model.folder.parent)

    def verify(self, model: ShelfModel, progress: ProgressCallback = ignore_progress) -> list[str]:
        """Return the files with pieces that are not what they were when they came. Blocks."""
        damaged = dict[str, None]()
        manifest = model.manifest
        for piece in manifest.pieces:
            path = manifest.files[piece.file].path
            try:
                content = read_piece(model, piece.number)
            except OSError:
                content = b""
            if digest_of(content) != manifest.digests[piece.number]:
                damaged[path] = None
            progress(f"checking {manifest.name}", piece.number + 1, len(manifest.pieces))
        return list(damaged)

    def _make_room(self, manifest: Manifest, part: Path, here: int) -> None:
        """Remove models that were not used for long until a model fits. Raises
        `ModelUnavailable`."""
        needed, models = manifest.size_bytes, self.models()
        others = [model for model in models if model.folder != part]
        used = sum(model.manifest.size_bytes for model in others)
        for model in sorted(others, key=lambda model: model.folder.stat().st_mtime):
            fits = not self.budget_bytes or used + needed <= self.budget_bytes
            if fits or needed > self.budget_bytes:
                break
            if self._try_remove(model):
                used -= model.manifest.size_bytes
        if self.budget_bytes and used + needed > self.budget_bytes:
            text = f"; {used / 1e9:.2f} GB are in use" if needed <= self.budget_bytes else ""
            raise ShelfUnavailable(
                f"{manifest.name} has {needed / 1e9:.2f} GB, and the budget of the model store is "
                f"{self.budget_bytes / 1e9:.2f} GB{text}",
                hint="raise store.budget, or `dynamo store remove` others",
            )
        free = shutil.disk_usage(self.root).free
        if free < needed - here:
            raise ShelfUnavailable(
                f"no room for {manifest.name} in {self.root}: {free / 1e6:.0f} MB are free, "
                f"{(needed - here) / 1e6:.0f} MB are needed",
                hint="free disk space, or set XDG_CACHE_HOME to a folder on another disk",
            )

    def _try_remove(self, model: ShelfModel) -> bool:
        """Delete a model unless a process uses or fetches it."""
        if not model.is_whole:
            with self.lock_model(model.manifest.name) as is_free:
                if is_free:
                    shutil.rmtree(model.folder, ignore_errors=True)
                return is_free
        handle = _holds.get(model.folder)
        if handle is not None:
            return False
        try:
            handle = os.open(model.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._discard(model.folder)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return True

    def _discard(self, folder: Path) -> None:
        """Take a folder away at once, then delete it."""
        _holds.pop(folder, None)
        removed = folder.with_name(f".{folder.name}{_REMOVED}")
        shutil.rmtree(removed, ignore_errors=True)
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _hold(self, folder: Path) -> ShelfModel | None:
        """Return the model of a folder under a shared lock, which lasts as long as this process."""
        if folder not in _holds:
            try:
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                return None
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_there = os.fstat(handle).st_ino == folder.stat().st_ino
            except OSError:  # the folder is being removed
                is_there = False
            if not is_there:
                os.close(handle)
                return None
            _holds[folder] = handle
            with suppress(OSError):  # a shelf that is only read
                os.utime(folder)
        manifest = read_manifest(folder)
        return None if manifest is None else ShelfModel(manifest, folder, is_whole=True)


def read_piece(model: ShelfModel, number: int) -> bytes:
    """Return a piece of a whole model, unchecked. Blocks. Raises `OSError`."""
    piece = model.manifest.pieces[number]
    with (model.folder / model.manifest.files[piece.file].path).open("rb") as file:
        file.seek(piece.start)
        return file.read(piece.size_bytes)


def _existing_root() -> Path | None:
    """Return the folder of the shelf without creating it, None if there is none."""
    with suppress(ModelUnavailable):
        return cache_dir("shelf")
    return None


def _folder_name(manifest: Manifest) -> str:
    return manifest.commit if manifest.with_weights else f"{manifest.commit}-{SMALL_FILES}"


def _ref_name(revision: str, ending: str) -> str:
    return f".{quote(revision, safe='')}{ending}.ref"
