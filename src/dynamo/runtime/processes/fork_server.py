"""The fork server: a process that has imported what workers need, and forks them.

A fork takes milliseconds of CPU, the imports of a worker 0.3 s. The server has one thread and no
event loop. The supervisor adopts the workers: the server's death ends none of them. Orders and
answers travel over a socket pair, which is the server's standard input. A server that a snapshot
restores connects to a socket of the supervisor instead.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from dynamo.core.host.parent_death_signal import adopt_orphans, set_parent_death_signal
from dynamo.runtime.processes.child_spec import ChildSpec

log = logging.getLogger(__name__)

ARGV = (sys.executable, "-P", "-m", "dynamo", "_child", "worker", "--fork-server")
SUPPORTED = sys.platform == "linux"
"""Other systems have no processes that adopt those of others, and libraries that forbid forks."""
MAX_MESSAGE_BYTES = 64 << 10
ANSWER_TIMEOUT_S = 30.0
"""A server that does not answer for this time is killed. The first answer waits for imports."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a Unix socket."""

Restore = Callable[[], tuple[int, int]]
"""Restores a server from a snapshot as a child of this process. Returns its process id, and a
descriptor that writes to its standard input. Blocks. Raises `OSError`."""


class ForkOrder(msgspec.Struct, frozen=True):
    """The order to fork a worker of an `engine`, with `environ` beside the server's variables, or
    `alone`. Its standard input and output come with it, then other descriptors."""

    engine: str
    environ: dict[str, str] = {}
    alone: bool = False


class StartedProcess(msgspec.Struct, frozen=True):
    """A process of our own, which the starter reaps. `fds` are the numbers that other descriptors
    than standard input and output have there."""

    pid: int
    fds: tuple[int, ...] = ()


class ForkServer:
    """The supervisor's side. The server starts with the first order, and after its death. With
    `restore` it is restored from a snapshot, or started if that fails."""

    def __init__(self, argv: Sequence[str] = ARGV, restore: Restore | None = None) -> None:
        self._argv = argv
        self._restore = restore
        self._pid = 0
        self._is_restored = False
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def _start(self) -> None:
        """Start the server, if none runs. The main thread must call this: the server dies with the
        thread that has started it."""
        if self._pid:
            return
        self._is_restored = False
        if self._restore is not None:
            try:
                await asyncio.to_thread(self._start_restored, self._restore)
                return
            except OSError as error:
                self.close()
                fields = {"error": str(error)}
                text = "the snapshot is not restored: workers start without it"
                log.warning(text, extra={"fields": fields})
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with child_end:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command, a short fork
                self._argv,
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._pid, process.returncode = process.pid, 0  # `close` waits for the process

    def _start_restored(self, restore: Restore) -> None:
        """Restore the server, and wait until it connects."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            address = f"\0dynamo-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen()
            listener.settimeout(ANSWER_TIMEOUT_S)
            self._pid, stdin = restore()
            os.write(stdin, address.encode())
            os.close(stdin)
            while True:
                self._socket, _ = listener.accept()
                options = socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size
                if CREDENTIALS.unpack(self._socket.getsockopt(*options))[0] == self._pid:
                    break
                self._socket.close()  # another process of this host
        self._socket.setblocking(False)
        self._is_restored = True
        log.info("a snapshot is restored", extra={"fields": {"pid": self._pid}})

    async def start(
        self, spec: ChildSpec, environ: Mapping[str, str], fds: Sequence[int]
    ) -> StartedProcess:
        """Start a process with these standard input and output, and other descriptors: a worker as
        a fork. The caller reaps it. Raises `OSError`."""
        if SUPPORTED and spec.role == "worker" and not spec.command:
            return await self.fork(spec.settings.engine.kind, environ, fds)
        # The main thread starts it: PR_SET_PDEATHSIG fires when the starting thread dies.
        process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own command, a short fork
            spec.argv,
            stdin=fds[0],
            stdout=fds[1],
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environ,
            pass_fds=fds[2:],
        )
        process.returncode = 0  # the caller waits for the process
        return StartedProcess(process.pid, tuple(fds[2:]))

    async def fork(
        self, engine: str, environ: Mapping[str, str], fds: Sequence[int]
    ) -> StartedProcess:
        """Fork a worker, which becomes a child of this process. Raises `OSError`."""
        different = {key: text for key, text in environ.items() if os.environ.get(key) != text}
        async with self._lock:
            adopt_orphans(True)
            try:
                await self._start()
                assert self._socket is not None  # noqa: S101 - the server has started
                alone = self._is_restored  # its own variables are those of another time
                variables = dict(environ) if alone else different
                order = msgspec.json.encode(ForkOrder(engine, variables, alone))
                with os.fdopen(os.memfd_create("dynamo-order"), "wb", buffering=0) as file:
                    file.write(order)  # variables can be more than a message may have
                    socket.send_fds(self._socket, [b"o"], [*fds, file.fileno()])
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await asyncio.get_running_loop().sock_recv(
                        self._socket, MAX_MESSAGE_BYTES
                    )
                return msgspec.json.decode(answer, type=StartedProcess)
            except BaseException as error:
                self.close()  # the next order must not get this answer
                if isinstance(error, msgspec.DecodeError):
                    raise ChildProcessError("the fork server ended") from error
                raise
            finally:
                adopt_orphans(False)

    async def renew(self) -> None:
        """Let the next worker be forked by a new server, which imports the present code."""
        async with self._lock:
            self.close()

    def close(self) -> None:
        """Kill the server. The workers that it has forked run on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pid:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = 0


def connect_restored() -> socket.socket:
    """Wait to be saved, with no thread, socket or event loop, and to be restored by a supervisor.
    Return a connection to it for `become_worker`."""
    address = os.read(0, 256)
    if not address:
        sys.exit(0)
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders.connect(address.decode())
    return orders


def become_worker(prepare: Callable[[str], None], orders: socket.socket | None = None) -> None:
    """Serve `orders`, by default from standard input, until their end, which ends the process.
    `prepare(engine)` imports what the engine needs. Returns in the forked processes alone, each of
    which has its own standard input and output."""
    set_parent_death_signal()
    orders = orders or socket.socket(fileno=os.dup(0))
    while True:
        data, fds, _, _ = socket.recv_fds(orders, MAX_MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
        if not data:
            sys.exit(0)
        with os.fdopen(fds.pop(), "rb") as file:
            file.seek(0)
            order = msgspec.json.decode(file.read(), type=ForkOrder)
        prepare(order.engine)
        gc.freeze()  # a collection in a worker would copy the pages of these objects
        pid = _fork_twice()
        if not pid:
            orders.close()
            if order.alone:
                os.environ.clear()
            os.environ.update(order.environ)
            os.setsid()
            for number, fd in enumerate((fds[0], fds[1], fds[1])):
                os.dup2(fd, number)
            os.close(fds[0])
            os.close(fds[1])
            return
        for fd in fds:
            os.close(fd)
        orders.send(msgspec.json.encode(StartedProcess(pid, tuple(fds[2:]))))


def _fork_twice() -> int:
    """Fork a process whose parent ends at once, so that the supervisor adopts it. Returns its pid,
    and 0 in it."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writer, b"%d" % pid)
            os._exit(0)
    os.close(writer)
    if not between:
        os.close(reader)
        return 0
    data = os.read(reader, 16)
    os.close(reader)
    os.waitpid(between, 0)
    if not data:
        raise ChildProcessError("the system starts no further process")
    return int(data)
