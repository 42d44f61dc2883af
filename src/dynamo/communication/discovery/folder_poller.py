"""The thread that polls a discovery folder for changes."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dynamo.communication.discovery.folder import FolderReader

_IN_CLOSE_WRITE, _IN_MOVED, _IN_CREATE, _IN_DELETE = 0x8, 0xC0, 0x100, 0x200
_MASK: Final = _IN_CLOSE_WRITE | _IN_MOVED | _IN_CREATE | _IN_DELETE
"""A process that dies closes the files that it had open for writing: `_IN_CLOSE_WRITE`."""
_BUFFER_BYTES: Final = 1 << 16


class FolderEvents:
    """Waits for changes of watched folders, or for `wake`.

    Without inotify (another system, or no instance or watch is left for this user) every `read`
    says that there may be changes. Methods other than `wake` are called by one thread.
    """

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._descriptor = -1
        self._library = ctypes.CDLL(None, use_errno=True)
        self._lock = threading.Lock()
        """Held while the descriptor of `wake` is used or closed: another one may get its number."""
        with suppress(AttributeError):
            self._descriptor = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll_woken, self._poll_all = select.poll(), select.poll()
        self._poll_woken.register(self._wake, select.POLLIN)
        self._poll_all.register(self._wake, select.POLLIN)
        if self._descriptor >= 0:
            self._poll_all.register(self._descriptor, select.POLLIN)

    def watch(self, folder: Path) -> None:
        """Watch a folder, too, until it is removed. Call before its entries are read."""
        if self._descriptor >= 0:
            path = os.fsencode(folder)
            number = self._library.inotify_add_watch(self._descriptor, path, _MASK)
            if number < 0 and ctypes.get_errno() != errno.ENOENT:
                self._close_inotify()

    def wait(self, seconds: float, *, woken_only: bool) -> None:
        """Return after `wake`, after a change unless `woken_only`, or after so many seconds."""
        (self._poll_woken if woken_only else self._poll_all).poll(seconds * 1e3)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def read(self) -> bool:
        """Return whether there may have been changes since the last call."""
        if self._descriptor < 0:
            return True
        try:
            return bool(os.read(self._descriptor, _BUFFER_BYTES))
        except BlockingIOError:
            return False

    def wake(self) -> None:
        """End the present `wait`, or the next one."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the descriptors."""
        self._close_inotify()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _close_inotify(self) -> None:
        if self._descriptor >= 0:
            self._poll_all.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.1
IDLE_INTERVAL_S: Final = 1.0
"""Folders whose changes the kernel does not tell, such as those of other machines, change later."""


class FolderPoller:
    """Polls a folder at once when it changes or after `wake`, 100 ms after that, and every second.

    The second poll sees what the first one cannot: the lock of a process that dies is free only
    after its event. Without events of the kernel the folder is polled every 100 ms.
    `on_state` is called on the loop with all records when some changed. `after_poll` is called on
    the thread after every poll.
    """

    def __init__(
        self,
        root: Path,
        on_state: Callable[[dict[str, bytes]], None],
        after_poll: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events = FolderEvents()
        self._reader = FolderReader(root, self._events.watch)
        self._on_state = on_state
        self._after_poll = after_poll
        self._stopping = False
        self._waiters: list[asyncio.Future[None]] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="discovery-look", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Poll now."""
        self._events.wake()

    async def poll(self) -> None:
        """Return after a complete poll that began after this call."""
        if self._stopping:
            return
        self.start()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._events.wake()
        await waiter

    def stop(self) -> None:
        """End the thread. Blocks."""
        self._stopping = True
        self._events.wake()
        if self._thread is not None:
            self._thread.join()
        self._reader.close()
        self._events.close()

    def _run(self) -> None:
        has_changed = True
        with suppress(RuntimeError):  # the loop was closed before the plane
            while not self._stopping:
                seconds = POLL_INTERVAL_S if has_changed else IDLE_INTERVAL_S
                self._events.wait(seconds, woken_only=has_changed)
                has_changed = self._events.read()
                waiters, self._waiters = self._waiters, []
                state = self._poll_folder()
                if state is not None:
                    self._loop.call_soon_threadsafe(self._on_state, state)
                if waiters:
                    self._loop.call_soon_threadsafe(_resolve_waiters, waiters)
                self._after_poll()

    def _poll_folder(self) -> dict[str, bytes] | None:
        try:
            return self._reader.poll()
        except OSError as error:  # for example no file descriptors: the next poll may succeed
            log.warning("cannot read the discovery folder", extra={"fields": {"error": str(error)}})
            return None


def _resolve_waiters(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
