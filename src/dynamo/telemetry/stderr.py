"""Standard error that never blocks: an unread pipe or a stopped terminal costs lines, not time."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

MAX_PENDING_BYTES = 1 << 20
"""Bytes that are kept for a reader that does not read. Further lines are dropped."""
CHUNK_BYTES = 64 << 10
BLOCKING_CHUNK_BYTES = 4096
"""A pipe that is writable takes this many bytes from a blocking write."""
RETRY_INTERVAL_S = 0.05
EXIT_FLUSH_S = 0.5
"""The end of the process waits this long for a reader."""


class NonBlockingWriter(io.RawIOBase):
    """Writes to a descriptor without waiting, from any thread.

    Bytes that the reader does not take at once are kept, and a thread writes them later. Beyond
    `MAX_PENDING_BYTES`, data is dropped until half of that is free; `describe_loss` then returns
    the text that tells how many lines are missing. The flags of the descriptor stay as they are,
    because the shell and other processes share them.
    """

    def __init__(self, fd: int) -> None:
        self.describe_loss: Callable[[int], str] = "{} log lines were lost\n".format
        self.dropped_lines = 0
        self._fd = os.dup(fd)  # `fd` itself may be redirected later
        self._write_now = _open_nonblocking(self._fd)
        self._lock = threading.RLock()  # a finalizer may log at any time
        self._pending = bytearray()  # not empty: the thread writes, and all others append
        self._missing_lines = 0
        self._has_pending = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None

    def write(self, data: Any, /) -> int:
        """Write or keep all of `data`, or drop it. Errors of a closed reader are ignored."""
        size = len(data)
        with self._lock:
            taken = 0
            if self._write_now is not None and not self._pending:
                taken = _write_some(self._write_now, data)
            if taken < size:
                self._keep(bytes(data[taken:]))
        return size

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, or until the time has passed."""
        self._is_idle.wait(timeout_s)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return True for a terminal."""
        return os.isatty(self._fd)

    def _keep(self, data: bytes) -> None:
        full = self._pending and len(self._pending) + len(data) > MAX_PENDING_BYTES
        if full or self._missing_lines:
            lines = data.count(b"\n") or 1
            self._missing_lines += lines
            self.dropped_lines += lines
            return
        self._pending += data
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_pending, name="logs", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                self._thread.start()
        self._is_idle.clear()
        self._has_pending.set()

    def _write_pending(self) -> None:
        write, size = self._write_now, CHUNK_BYTES
        if write is None:
            write, size = partial(os.write, self._fd), BLOCKING_CHUNK_BYTES
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while True:
            self._has_pending.wait()
            poll.poll()
            taken = _write_some(write, bytes(self._pending[:size]))
            if not taken:
                time.sleep(RETRY_INTERVAL_S)
                continue
            with self._lock:
                del self._pending[:taken]
                if self._missing_lines and len(self._pending) <= MAX_PENDING_BYTES // 2:
                    self._pending += self.describe_loss(self._missing_lines).encode()
                    self._missing_lines = 0
                if not self._pending:
                    self._has_pending.clear()
                    self._is_idle.set()


def _write_some(write: Callable[[bytes], int], data: bytes) -> int:
    """Return the number of bytes taken; 0 if the write would block, all if the reader is gone."""
    try:
        return write(data)
    except BlockingIOError:
        return 0
    except (OSError, ValueError):
        return len(data)


def _open_nonblocking(fd: int) -> Callable[[bytes], int] | None:
    """Return a write function that never blocks; None if the system offers none for `fd`."""
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return partial(os.write, fd)
        if stat.S_ISSOCK(mode):
            connection = socket.socket(fileno=os.dup(fd))
            return lambda data: connection.send(data, socket.MSG_DONTWAIT)
        # Opened again, the pipe or terminal has flags of its own.
        own_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        return partial(os.write, own_fd)
    return None


_writer: NonBlockingWriter | None = None


def unblock_stderr() -> TextIO:
    """Let `sys.stderr` write through a `NonBlockingWriter`, and return it. Later calls and a
    `sys.stderr` that was replaced before, for example by a test, change nothing."""
    global _writer
    if _writer is None and (fd := _descriptor(sys.stderr, sys.__stderr__)) is not None:
        _writer = NonBlockingWriter(fd)
        sys.stderr = _text_stream(_writer)
        atexit.register(_writer.drain, EXIT_FLUSH_S)
    return sys.stderr


def is_unblocked() -> bool:
    """Whether `sys.stderr` has a descriptor of its own, so that descriptor 2 may be redirected."""
    return _writer is not None


def unblock_stdout() -> None:
    """Do the same with `sys.stdout` if it leads to the same reader as `sys.stderr`."""
    fd = _descriptor(sys.stdout, sys.__stdout__)
    if _writer is not None and fd is not None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.fstat(_writer.fileno())):
                sys.stdout = _text_stream(_writer)


def open_stdout() -> TextIO:
    """Return a stream to standard output that does not block."""
    fd = _descriptor(sys.stdout, sys.__stdout__)
    if fd is None:
        return sys.stdout
    writer = NonBlockingWriter(fd)
    atexit.register(writer.drain, EXIT_FLUSH_S)
    return _text_stream(writer)


def _descriptor(stream: TextIO | None, original: TextIO | None) -> int | None:
    """Return the descriptor of a standard stream; None if it is absent or was replaced."""
    return None if stream is None or stream is not original else stream.fileno()


def on_loss(describe: Callable[[int], str]) -> None:
    """Let `describe(lines)` return the text that tells of lost lines."""
    if _writer is not None:
        _writer.describe_loss = describe


def dropped_lines() -> int:
    """Return the number of lines that this process dropped because nobody read them."""
    return 0 if _writer is None else _writer.dropped_lines


def _text_stream(writer: NonBlockingWriter) -> TextIO:
    stream: Any = writer
    encoding = sys.stderr.encoding
    return io.TextIOWrapper(stream, encoding, errors="backslashreplace", line_buffering=True)
