"""Fetching of a model by one process: from its source to the shelf."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from time import monotonic
from typing import TypeVar

from dynamo.core.errors import ModelUnavailable
from dynamo.models.downloads.bucket import BucketSource
from dynamo.models.downloads.fetch_counts import FETCHED
from dynamo.models.downloads.hub import HubSource
from dynamo.models.downloads.sources import (
    BUCKET_SCHEMES,
    FOLDER_SCHEME,
    FolderSource,
    ModelSpec,
    Source,
    SourceBusy,
    SourceUnavailable,
)
from dynamo.models.file_cache import ProgressCallback, ignore_progress
from dynamo.models.shelf.manifest import Manifest
from dynamo.models.shelf.partial import PartialModel
from dynamo.models.shelf.shelf import Shelf, ShelfModel

T = TypeVar("T")
READ_THREADS = 3
"""Pieces that one process reads from a source at a time."""
MAX_ATTEMPTS = 6
"""Attempts in a row to read from a source without a byte."""
FIRST_DELAY_S = 0.5
POLL_S = 0.2
STOP_TIMEOUT_S = 3.0
"""A thread that reads from a source may take this long to stop."""


def open_source(spec: ModelSpec, *, with_weights: bool = True) -> Source:
    """Return the source of a model, without I/O. Raises `ModelUnavailable`."""
    if spec.name.startswith(BUCKET_SCHEMES):
        return BucketSource(spec, with_weights=with_weights)
    if spec.name.startswith(FOLDER_SCHEME):
        return FolderSource(spec, with_weights=with_weights)
    return HubSource(spec, with_weights=with_weights)


def is_offline() -> bool:
    """Whether the environment forbids to ask sources: HF_HUB_OFFLINE."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def offline_error(spec: ModelSpec) -> ModelUnavailable:
    """Return the error for a model that is not here and may not be fetched from its source."""
    return ModelUnavailable(
        f"{spec.name} is not on this machine, and the model store is offline",
        hint="give the path of a model folder, or unset store.offline and HF_HUB_OFFLINE",
    )


def fetch_piece(partial: PartialModel, source: Source, number: int, stopped: Event) -> int:
    """Read a piece from its source and store it, until `stopped` is set. Returns the bytes that
    were read now. Blocks. Raises `SourceBusy` at once, and `ModelUnavailable`."""
    piece = partial.manifest.pieces[number]
    file = partial.manifest.files[piece.file]
    path, fetched, attempts = partial.head_path(number), 0, 0
    with partial.storage_errors():
        head = path.open("a+b", buffering=0)

    def store(data: bytes) -> None:
        _check(stopped)
        with partial.storage_errors():
            head.write(data)

    with head:
        while (have := os.fstat(head.fileno()).st_size) < piece.size_bytes:
            span = range(piece.start + have, piece.start + piece.size_bytes)
            try:
                source.read(partial.manifest, file, span, store)
            except SourceBusy:
                raise
            except SourceUnavailable:
                attempts += 1
                if attempts >= MAX_ATTEMPTS:
                    raise
                if stopped.wait(FIRST_DELAY_S * 2**attempts):
                    raise stopped_error() from None
            if grown := os.fstat(head.fileno()).st_size - have:
                fetched, attempts = fetched + grown, 0
        head.seek(0)
        content = head.read()
    path.unlink(missing_ok=True)
    try:
        partial.write(number, [content])
    except ValueError as error:
        raise ModelUnavailable(f"{file.path} of {partial.manifest.name} arrived damaged") from error
    return fetched


def stopped_error() -> ModelUnavailable:
    """Return the error of a download that was stopped."""
    return ModelUnavailable("the download was stopped")


def _check(stopped: Event) -> None:
    if stopped.is_set():
        raise stopped_error()


class SourceReader:
    """Reads a model from its source, in several threads. While the source is busy, one of them
    waits for all and calls `on_busy(text, seconds)`. All methods block until `stopped` is set and
    raise `ModelUnavailable`."""

    def __init__(
        self, source: Source, stopped: Event, on_busy: Callable[[str, float], object]
    ) -> None:
        self.source = source
        self._stopped = stopped
        self._on_busy = on_busy
        self._busy = Lock()

    def resolve(self, known: list[Manifest]) -> Manifest:
        """Return the manifest of the commit that the revision means now."""
        return self._ask(lambda: self.source.resolve(known))

    def fetch(self, partial: PartialModel, number: int) -> None:
        """Store a piece, and count what was read."""

        def work() -> None:
            began = monotonic()
            size_bytes = fetch_piece(partial, self.source, number, self._stopped)
            FETCHED.add(self.source.kind, size_bytes, monotonic() - began)

        self._ask(work)

    def fetch_all(self, partial: PartialModel, progress: ProgressCallback) -> None:
        """Store all pieces that are missing. The first error stops all threads."""
        manifest, errors = partial.manifest, list[Exception]()
        missing = deque(
            piece.number for piece in manifest.pieces if piece.number not in partial.digests
        )

        def work() -> None:
            try:
                while missing and not self._stopped.is_set():
                    with suppress(IndexError):  # another thread was faster
                        self.fetch(partial, missing.popleft())
                    progress(f"fetching {manifest.name}", partial.done_bytes, manifest.size_bytes)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                self._stopped.set()

        threads = [Thread(target=work, daemon=True) for _ in range(READ_THREADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not self._stopped.wait(POLL_S):
            pass
        for thread in threads:
            thread.join(STOP_TIMEOUT_S)
        if errors:
            raise errors[0]
        _check(self._stopped)

    def _ask(self, work: Callable[[], T]) -> T:
        while True:
            with self._busy:
                _check(self._stopped)
            try:
                return work()
            except SourceUnavailable as error:
                FETCHED.failures[self.source.kind] += 1
                if not isinstance(error, SourceBusy):
                    raise
                if self._busy.acquire(blocking=False):
                    wait_s = error.retry_after_s or 1.0
                    try:
                        self._on_busy(
                            f"{error.message}: it is asked again in {wait_s:.0f} s", wait_s
                        )
                        self._stopped.wait(wait_s)
                    finally:
                        self._busy.release()


def fetch_alone(
    spec: ModelSpec,
    shelf: Shelf,
    progress: ProgressCallback = ignore_progress,
    stopped: Event | None = None,
    *,
    with_weights: bool = True,
    newest: bool = False,
    on_start: Callable[[PartialModel], None] = lambda _: None,
) -> ShelfModel:
    """Return a model on the shelf, fetched from its source if it is not there. `newest`: what the
    revision means now. `on_start` is called before the first byte of a piece. Blocks until
    `stopped` is set. Raises `ModelUnavailable`."""
    stopped = stopped or Event()
    while True:
        model = shelf.find(spec.name, spec.revision, with_weights=with_weights)
        if model is not None and not newest:
            return model
        if is_offline():
            raise offline_error(spec)
        with shelf.lock_model(spec.name) as is_own:
            if is_own:
                source = open_source(spec, with_weights=with_weights)
                reader = SourceReader(source, stopped, lambda text, _: progress(text, 0, 0))
                return _fetch(reader, spec, shelf, progress, on_start)
        if stopped.wait(POLL_S):  # another process of this machine fetches it
            raise stopped_error()


def _fetch(
    reader: SourceReader,
    spec: ModelSpec,
    shelf: Shelf,
    progress: ProgressCallback,
    on_start: Callable[[PartialModel], None],
) -> ShelfModel:
    """Fetch what a revision means now. The caller holds the model's lock."""
    manifest = reader.resolve(shelf.started(spec.name))
    model = shelf.find(spec.name, manifest.commit, with_weights=manifest.with_weights)
    if model is not None:
        shelf.name_commit(model.manifest, spec.revision)
        return model
    partial = shelf.open_partial(manifest, progress)
    try:
        on_start(partial)
        reader.fetch_all(partial, progress)
        return shelf.finish(partial, spec.revision, progress)
    finally:
        partial.close()
