"""Memory that the processes of a deployment share: each piece is made by one of them, and sealed.

The supervisor holds the descriptors and maps nothing, so that memory outlives the processes that
use it. Descriptors travel over a socket pair for each child, beside `processes/parent_pipe.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Literal

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS

KEEP_S = 60.0
"""Memory that no process uses is kept for this time: a restart or a scale to 1 finds it again."""
MAX_MESSAGE_BYTES = 4096
SUPPORTED = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")
SEALS = 0
"""Nobody can write to sealed memory, nor change its size under a reader."""
if SUPPORTED:
    SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryMessage(msgspec.Struct, frozen=True):
    """A message about the memory `key`. A child sends `open`, and after the answer `build` either
    `built` with the descriptor or `failed`. The answer `memory` has the descriptor. `release` says
    that the child uses the memory no more."""

    kind: Literal["open", "build", "built", "failed", "memory", "release"]
    key: str


class SharedMemoryClient:
    """The child's end of the socket pair `fd`. Its methods may be called on any thread."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._lock = Lock()

    def open(self, key: str, build: Callable[[], int]) -> int:
        """Return a descriptor of the memory `key`, which the caller closes. Blocks while another
        process builds it. `build` returns the descriptor of new memory, if nobody has built it; its
        errors are raised again. Raises `OSError` without a supervisor."""
        with self._lock:
            _send(self._socket, MemoryMessage("open", key))
            message, fd = _receive(self._socket)
            if message.kind == "memory":
                return fd
            try:
                fd = build()
            except BaseException:
                _send(self._socket, MemoryMessage("failed", key))
                raise
            _send(self._socket, MemoryMessage("built", key), fd)
            return fd

    def release(self, key: str) -> None:
        """Tell the supervisor that this process uses the memory `key` no more."""
        with self._lock:
            _send(self._socket, MemoryMessage("release", key))

    def close(self) -> None:
        """End a call that waits, with `OSError`. The supervisor forgets this process."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Memory:
    """A piece of memory. `fd` is -1 until `builder` has built it. `users` may have it mapped."""

    def __init__(self) -> None:
        self.fd = -1
        self.builder: socket.socket | None = None
        self.waiting: list[socket.socket] = []
        self.users: set[socket.socket] = set()
        self.cancel_expiry: Callable[[], None] = lambda: None


class SharedMemoryBroker:
    """The supervisor's side. `on_change` is called when `size_bytes` changes."""

    def __init__(self, clock: Clock, on_change: Callable[[], None], keep_s: float = KEEP_S) -> None:
        self._clock = clock
        self._on_change = on_change
        self._keep_s = keep_s
        self._memories: dict[str, _Memory] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes of all memory, which counts once however many processes map it."""
        return sum(
            os.fstat(memory.fd).st_size for memory in self._memories.values() if memory.fd >= 0
        )

    @contextmanager
    def channel(self) -> Iterator[socket.socket | None]:
        """Yield the end of a socket pair for one child, and serve the other end within the
        context, which ends with the child. Yields None where the system cannot share memory."""
        if not SUPPORTED:
            yield None
            return
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_end.setblocking(False)
        loop = asyncio.get_running_loop()
        with own_end, child_end:
            loop.add_reader(own_end, self._on_readable, loop, own_end)
            try:
                yield child_end
            finally:
                self._disconnect(loop, own_end)

    def drop_unused(self) -> None:
        """Give back what no process uses, before its time."""
        for key, memory in list(self._memories.items()):
            if memory.fd >= 0 and not memory.users:
                self._drop(key)

    def close(self) -> None:
        """Give all memory back."""
        for key in list(self._memories):
            self._drop(key)

    def _on_readable(self, loop: asyncio.AbstractEventLoop, child: socket.socket) -> None:
        try:
            message, fd = _receive(child)
        except BlockingIOError:
            return
        except OSError:
            self._disconnect(loop, child)
            return
        if message.kind == "open":
            self._open(message.key, child)
        elif message.kind == "release":
            self._leave(message.key, child)
        elif message.kind == "built" and self._on_built(message.key, fd, child):
            return
        else:
            self._on_failed(message.key, child)
        if fd >= 0:
            os.close(fd)

    def _open(self, key: str, child: socket.socket) -> None:
        memory = self._memories.setdefault(key, _Memory())
        if memory.fd >= 0:
            self._pass_on(key, memory, child)
        elif memory.builder is None:
            memory.builder = child
            _send(child, MemoryMessage("build", key))
        else:
            memory.waiting.append(child)

    def _pass_on(self, key: str, memory: _Memory, child: socket.socket) -> None:
        memory.cancel_expiry()
        memory.users.add(child)
        _send(child, MemoryMessage("memory", key), memory.fd)

    def _on_built(self, key: str, fd: int, child: socket.socket) -> bool:
        """Keep new memory. Returns False if the child was not to build it, or did not seal it."""
        memory = self._memories.get(key)
        if memory is None or memory.builder is not child or fd < 0:
            return False
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            return False
        memory.fd, memory.builder = fd, None
        memory.users.add(child)
        waiting, memory.waiting = memory.waiting, []
        for other in waiting:
            self._pass_on(key, memory, other)
        self._on_change()
        return True

    def _on_failed(self, key: str, child: socket.socket) -> None:
        """Let the next child build what this one did not."""
        memory = self._memories.get(key)
        if memory is None or memory.builder is not child:
            return
        if memory.waiting:
            memory.builder = memory.waiting.pop(0)
            _send(memory.builder, MemoryMessage("build", key))
        else:
            del self._memories[key]

    def _disconnect(self, loop: asyncio.AbstractEventLoop, child: socket.socket) -> None:
        loop.remove_reader(child)
        for key, memory in list(self._memories.items()):
            if child in memory.waiting:
                memory.waiting.remove(child)
            self._on_failed(key, child)
            self._leave(key, child)

    def _leave(self, key: str, child: socket.socket) -> None:
        """Keep memory for a while that its last user has left."""
        memory = self._memories.get(key)
        if memory is None or child not in memory.users:
            return
        memory.users.remove(child)
        if not memory.users:
            expires_at = self._clock.now() + self._keep_s
            memory.cancel_expiry = self._clock.call_at(expires_at, partial(self._drop, key))

    def _drop(self, key: str) -> None:
        memory = self._memories.pop(key)
        memory.cancel_expiry()
        if memory.fd >= 0:
            os.close(memory.fd)
            self._on_change()


def _send(end: socket.socket, message: MemoryMessage, fd: int = -1) -> None:
    data = msgspec.json.encode(message)
    with suppress(OSError):  # the other process has ended: its end of file follows
        socket.send_fds(end, [data], [fd] if fd >= 0 else [])


def _receive(end: socket.socket) -> tuple[MemoryMessage, int]:
    """Return the next message, and the descriptor that came with it or -1. Raises `OSError`."""
    data, fds, _, _ = socket.recv_fds(end, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("the other process has ended")
    try:
        return msgspec.json.decode(data, type=MemoryMessage), fds[0] if fds else -1
    except DECODE_ERRORS as error:
        for fd in fds:
            os.close(fd)
        raise ConnectionAbortedError(f"no message about shared memory: {error}") from error
