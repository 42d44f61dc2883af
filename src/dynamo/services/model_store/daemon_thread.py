"""Blocking work in a thread that does not delay the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
CANCEL_TIMEOUT_S = 3.0
"""Cancelled work may take this long to stop; the process does not wait longer."""


async def run_in_daemon(work: Callable[[], T], stopped: threading.Event | None = None) -> T:
    """Return the result of `work`. Cancelling sets `stopped`, and waits a little for the thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            future.set_exception(error)

    thread = threading.Thread(target=run, name="fetch", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if stopped is not None:
            stopped.set()
            await asyncio.to_thread(thread.join, CANCEL_TIMEOUT_S)
        raise
