"""Events of the kernel (inotify) that say that a folder may have changed."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

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
