"""Blocking work in a thread that does not delay the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
CANCEL_TIMEOUT_S = 3.0
"""Cancelled work may take this long to stop; the process does not wait longer."""


async def run_in_daemon(work: Callable[[], T], stopped: threading.Event | None = None) -> T:
    """Return the result of `work`. Cancelling sets `stopped`, and waits a little for the thread."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failures.append(error)
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=run, name="fetch", daemon=True)
    thread.start()
    try:
        await ended.wait()
    except asyncio.CancelledError:
        if stopped is not None:
            stopped.set()
            await asyncio.to_thread(thread.join, CANCEL_TIMEOUT_S)
        raise
    for failure in failures:
        raise failure
    return results[0]
