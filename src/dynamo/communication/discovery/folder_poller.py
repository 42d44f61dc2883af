"""The thread that looks at the folder."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dynamo.communication.discovery.folder import FolderReader

log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.1


class FolderPoller:
    """Looks every 100 ms, and at once when woken; tells `take` on the loop where it saw changes.

    `each` is called on the thread after every look.
    """

    def __init__(
        self, root: Path, take: Callable[[dict[str, bytes]], None], each: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = FolderReader(root)
        self._on_state = take
        self._after_poll = each
        self._wake = threading.Event()
        self._stopping = False
        self._waiters: list[asyncio.Future[None]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start looking; a second call does nothing."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="discovery-look", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    async def poll(self) -> None:
        """Return after a look that began after this call."""
        if self._stopping:
            return
        self.start()
        done = self._loop.create_future()
        self._waiters.append(done)
        self._wake.set()
        await done

    def stop(self) -> None:
        """Blocking: end the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the loop was closed without closing the plane
            while not self._stopping:
                self._wake.wait(POLL_INTERVAL_S)
                self._wake.clear()
                waiting, self._waiters = self._waiters, []
                state = self._poll_folder()
                if state is not None:
                    self._loop.call_soon_threadsafe(self._on_state, state)
                if waiting:
                    self._loop.call_soon_threadsafe(_resolve_waiters, waiting)
                self._after_poll()

    def _poll_folder(self) -> dict[str, bytes] | None:
        try:
            return self._reader.poll()
        except OSError as error:  # out of descriptors, say: the next look may go well
            log.warning("discovery folder unreadable", extra={"fields": {"error": str(error)}})
            return None


def _resolve_waiters(waiting: list[asyncio.Future[None]]) -> None:
    for done in waiting:
        if not done.done():
            done.set_result(None)
