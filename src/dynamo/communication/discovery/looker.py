"""The thread that looks at the folder."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dynamo.communication.discovery.folder import Reader

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.1


class Looker:
    """Looks every 100 ms, and at once when woken; tells `take` on the loop where it saw changes.

    `each` is called on the thread after every look.
    """

    def __init__(
        self, root: Path, take: Callable[[dict[str, bytes]], None], each: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(root)
        self._take = take
        self._each = each
        self._wake = threading.Event()
        self._stopping = False
        self._waiting: list[asyncio.Future[None]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start looking; a second call does nothing."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="discovery-look", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    async def look(self) -> None:
        """Return after a look that began after this call."""
        if self._stopping:
            return
        self.start()
        done = self._loop.create_future()
        self._waiting.append(done)
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
                self._wake.wait(LOOK_EVERY_S)
                self._wake.clear()
                waiting, self._waiting = self._waiting, []
                state = self._read()
                if state is not None:
                    self._loop.call_soon_threadsafe(self._take, state)
                if waiting:
                    self._loop.call_soon_threadsafe(_resolve, waiting)
                self._each()

    def _read(self) -> dict[str, bytes] | None:
        try:
            return self._reader.look()
        except OSError as error:  # out of descriptors, say: the next look may go well
            log.warning("discovery folder unreadable", extra={"fields": {"error": str(error)}})
            return None


def _resolve(waiting: list[asyncio.Future[None]]) -> None:
    for done in waiting:
        if not done.done():
            done.set_result(None)
