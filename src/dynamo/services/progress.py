"""How far the model's files are, in words, now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

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
