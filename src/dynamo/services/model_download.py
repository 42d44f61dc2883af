"""Download of a model's files while the frontends already answer that it is in progress."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from dynamo.core.errors import DynamoError
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import AUTO
from dynamo.core.settings.server_url import lacks_tokenizer
from dynamo.core.tasks import run_all
from dynamo.models.file_cache import ProgressCallback as ModelProgress
from dynamo.models.location import locate_model
from dynamo.runtime.processes.supervisor import Prepare

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 2.0


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


CANCEL_TIMEOUT_S = 3.0
"""A cancelled download may take this long to stop; the process does not wait longer."""
PREPARING_REASON = "the model is being prepared"


def make_preparation(
    workers: Sequence[Settings], progress_display: AbstractContextManager[ModelProgress]
) -> Prepare | None:
    """Return what downloads the workers' models at once, or None if all are on this host.

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

    async def fetch(report: Callable[[str], None]) -> None:
        report(PREPARING_REASON)
        with progress_display as display:
            reported = ThreadSafeProgress(lambda text: report(f"{PREPARING_REASON}: {text}"))
            await run_all(*(fetch_one(each, display, reported) for each in missing.values()))

    async def fetch_one(settings: Settings, *callbacks: ModelProgress) -> None:
        try:
            await fetch_model(settings, *callbacks)
        except DynamoError as error:
            if len({each.model.path for each in workers}) == 1:
                raise
            fields = {"model": settings.model.path, "error": error.message}
            log.warning("a model cannot be fetched", extra={"fields": fields})

    return fetch


async def fetch_model(settings: Settings, *callbacks: ModelProgress) -> None:
    """Fetch the model and verify its encoder. Cancelling stops it. Raises `ModelUnavailable`."""
    stopped = threading.Event()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    arguments = (settings, callbacks, stopped, done)
    # A daemon thread: a hanging download must not delay the end of the process.
    thread = threading.Thread(target=_fetch_in_thread, args=arguments, name="fetch", daemon=True)
    thread.start()
    try:
        await done
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.to_thread(thread.join, CANCEL_TIMEOUT_S)
        raise


def _fetch_in_thread(
    settings: Settings,
    callbacks: tuple[ModelProgress, ...],
    stopped: threading.Event,
    done: asyncio.Future[None],
) -> None:
    from dynamo.models.resolve import resolve_model_blocking

    def progress(step: str, done_bytes: int, total: int) -> None:
        for callback in callbacks:
            callback(step, done_bytes, total)

    failure: Exception | None = None
    try:
        kind = settings.engine.kind
        with_weights = kind != AUTO and engine_needs_weights(kind)  # auto: no workers are here
        resolve_model_blocking(
            settings.model.path, progress, with_weights=with_weights, stopped=stopped
        )
    except Exception as error:  # noqa: BLE001 - raised again by fetch_model
        failure = error
    done.get_loop().call_soon_threadsafe(_resolve_future, done, failure)


def _resolve_future(done: asyncio.Future[None], failure: Exception | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
