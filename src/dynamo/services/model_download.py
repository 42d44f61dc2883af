"""The model's files, fetched while the frontends answer already that they are on their way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from dynamo.core.plugins import engine_needs_weights
from dynamo.core.settings import Settings
from dynamo.models.file_cache import ProgressCallback as ModelProgress
from dynamo.models.location import locate_model
from dynamo.runtime.processes.supervisor import Prepare

REPORT_INTERVAL_S = 2.0


class ThreadSafeProgress:
    """A `models` progress that may be called from any thread; `tell(text)` hears of it on the loop
    that this was made on: every step at once, how far it is every few seconds."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._report = tell
        self._loop = asyncio.get_running_loop()
        self._last_report = ("", 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if (
            what == self._last_report[0]
            and now - self._last_report[1] < REPORT_INTERVAL_S
            and done < total
        ):
            return
        self._last_report = (what, now)
        share = f" ({done * 100 // total} %)" if total else ""
        self._loop.call_soon_threadsafe(self._report, f"{what}{share}")


CANCEL_TIMEOUT_S = 3.0
"""So long a fetch that was told to stop may take to do so; the process does not wait longer."""
PREPARING_REASON = "the model is getting ready"


def make_preparation(
    settings: Settings, shown: AbstractContextManager[ModelProgress]
) -> Prepare | None:
    """What fetches the model that `settings` name, with a progress that is entered meanwhile; None
    where the model is here. Raises `ModelUnavailable` where it cannot be anywhere."""
    if locate_model(settings.model.path).path is not None:
        return None

    async def fetch(tell: Callable[[str], None]) -> None:
        tell(PREPARING_REASON)
        with shown as progress:
            told = ThreadSafeProgress(lambda how: tell(f"{PREPARING_REASON}: {how}"))
            await fetch_model(settings, progress, told)

    return fetch


async def fetch_model(settings: Settings, *told: ModelProgress) -> None:
    """Find or fetch it and prove its encoder. Cancelling ends a download. Raises
    `ModelUnavailable`."""
    stopped = threading.Event()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    arguments = (settings, told, stopped, done)
    # A daemon: what hangs in the network must not hold up the end of the process.
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
    told: tuple[ModelProgress, ...],
    stopped: threading.Event,
    done: asyncio.Future[None],
) -> None:
    from dynamo.models.resolve import resolve_model_blocking

    def progress(what: str, at: int, total: int) -> None:
        for one in told:
            one(what, at, total)

    failure: Exception | None = None
    try:
        with_weights = engine_needs_weights(settings.engine.kind)
        resolve_model_blocking(
            settings.model.path, progress, with_weights=with_weights, stopped=stopped
        )
    except Exception as error:  # noqa: BLE001 - raised again where it is awaited
        failure = error
    done.get_loop().call_soon_threadsafe(_resolve_future, done, failure)


def _resolve_future(done: asyncio.Future[None], failure: Exception | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
