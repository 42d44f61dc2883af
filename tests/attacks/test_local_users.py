"""Attacks by other users of the host on a deployment that listens on loopback only."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.attacks import other_user
from tests.attacks.client import chat, exchange, request_bytes
from tests.faults.cluster import Cluster
from tests.support.servers import free_port

from dynamo.communication.discovery import open_discovery
from dynamo.communication.frames import HELLO
from dynamo.communication.options import PlaneOptions
from dynamo.communication.requests import open_requests
from dynamo.core.context import Context
from dynamo.core.host.pids import start_ticks

Report = Callable[[str], None]
DYNAMO = (sys.executable, "-P", "-m", "dynamo")
NOBODY = 65534


@pytest.fixture
def _root() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens on loopback."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1][-4:], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def folder_of(cluster: Cluster) -> Path:
    """Return the state folder of a deployment."""
    return cluster.folder / "dynamo" / f"http-{cluster.port}"


@pytest.mark.attack(
    "another user of the host calls workers and follows events",
    "no call is answered and no event is received",
)
@pytest.mark.usefixtures("_root")
def test_another_user_cannot_use_the_planes(deployment: Cluster, outcome: Report) -> None:
    assert chat(deployment.port).status == 200
    workers = deployment.processes("worker")
    ports = [port for worker in workers for port in listening_ports(worker.pid)]
    command = [sys.executable, "-P", other_user.__file__, ",".join(map(str, ports))]
    attack = subprocess.run(command, capture_output=True, timeout=60)
    assert attack.returncode == 0, attack.stderr.decode()
    result = json.loads(attack.stdout)
    assert result["uid"] == NOBODY
    assert len(result["calls"]) == len(other_user.ENDPOINTS) * len(workers)
    assert all("requires the deployment's secret" in text for text in result["calls"])
    assert len(result["events"]) == len(workers)
    assert all(set(kinds) <= {HELLO} for kinds in result["events"])
    assert len(result["memory"]) >= len(workers)
    assert set(map(tuple, result["memory"])) == {("", 0)}
    assert set(result["nested"]) == {""}
    assert "unreadable hello: maximum recursion depth" in deployment.log
    assert chat(deployment.port).status == 200
    outcome(f"{len(result['calls'])} calls refused, no event sent, no traceback")


@pytest.mark.attack(
    "another user reads arguments, environment and logs, and posts to status ports",
    "no secret is found and nothing accepts an order",
)
def test_the_secret_is_in_one_file_only(deployment: Cluster, outcome: Report) -> None:
    secret_file = folder_of(deployment) / "discovery" / "secret"
    secret = secret_file.read_text()
    assert secret_file.stat().st_mode & 0o777 == 0o600
    roles = ("supervisor", "frontend", "worker")
    processes = [record for role in roles for record in deployment.processes(role)]
    for record in processes:
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{record.pid}/{name}").read_bytes()
        port = int(record.status_url.rpartition(":")[2])
        for path in ("/health", "/metrics", "/stop"):
            assert exchange(port, request_bytes(b"{}", path)).status == 405
        for path in ("/health", "/metrics"):
            page = exchange(port, request_bytes(b"", path, method="GET")).body
            assert secret.encode() not in page
    assert secret not in deployment.log
    outcome(f"in none of {len(processes)} processes; status ports answer 405")


def test_a_deleted_secret_survives_with_its_processes(deployment: Cluster) -> None:
    """A worker that starts after the deletion of the secret is reached by the others."""
    secret_file = folder_of(deployment) / "discovery" / "secret"
    secret = secret_file.read_text()
    secret_file.unlink()
    dead = deployment.kill("worker")
    deployment.wait_blocking(
        lambda: (
            len(ready := deployment.ready("worker")) == 2
            and dead not in [record.pid for record in ready]
        )
    )
    assert secret_file.read_text() == secret
    served = set()
    end = time.monotonic() + 20
    while len(served) < 2:
        answer = chat(deployment.port)
        assert answer.status == 200
        served.add(answer.headers["x-dynamo-worker"])
        assert time.monotonic() < end


@pytest.mark.attack(
    "another user opens 400 connections to a worker and proves nothing",
    "at most 128 stay; own processes connect and are answered",
)
async def test_unproven_connections_keep_nobody_out(deployment: Cluster, outcome: Report) -> None:
    worker = deployment.ready("worker")[0]
    port = int(worker.address.split("/")[2].rpartition(":")[2])
    descriptors = Path(f"/proc/{worker.pid}/fd")
    before = len(list(descriptors.iterdir()))
    discovery = await open_discovery(f"file:{folder_of(deployment)}/discovery")
    plane = await open_requests("tcp:", PlaneOptions(folder_secret=discovery.secret))
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        call = plane.call(
            worker.address, "dynamo.worker.kv_blocks", b"", Context("own"), lambda _: True
        )
        await asyncio.wait_for(call, 5)
        assert chat(deployment.port).status == 200
        opened = len(list(descriptors.iterdir())) - before
    await plane.close()
    await discovery.close()
    assert opened <= 140
    outcome(f"{opened} connections stayed, a new caller was answered")


@pytest.fixture
def hostile_base(_root: None, tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A base of state folders in which another user was first, and a process of ours.

    A link leads to a folder that anybody can write. A forged record there names the process.
    """
    base, public = tmp_path / "base", tmp_path / "public"
    for folder in (base, public):
        folder.mkdir()
        folder.chmod(0o1777)
    with subprocess.Popen(["sleep", "60"]) as victim:
        record = {"deployment": "evil", "role": "supervisor", "name": "supervisor"}
        record |= {"pid": victim.pid, "start_ticks": start_ticks(victim.pid), "state": "ready"}
        record |= {"instance": "x", "address": "http://127.0.0.1:1"}
        for folder in (base / "dynamo", public / "processes"):
            folder.mkdir()
            os.chown(folder, NOBODY, NOBODY)
        (base / "dynamo" / "evil").symlink_to(public)
        (public / "processes" / "x.json").write_text(json.dumps(record))
        yield base, victim
        victim.kill()


@pytest.mark.attack(
    "another user makes our state folder first, with a forged record behind a link",
    "`dynamo stop` signals nobody, `dynamo run` serves",
)
def test_a_state_folder_of_another_user_is_ignored(
    hostile_base: tuple[Path, subprocess.Popen[bytes]],
    tiny_model: Path,
    tmp_path: Path,
    outcome: Report,
) -> None:
    base, victim = hostile_base
    environ = os.environ | {"XDG_RUNTIME_DIR": str(base)}
    stop = [*DYNAMO, "stop", "evil", "--timeout", "2"]
    stopped = subprocess.run(stop, env=environ, capture_output=True, text=True)
    assert stopped.returncode == 1
    assert stopped.stderr.count("is ignored: it belongs to another user") == 1
    port = free_port()
    run = [*DYNAMO, "run", "out=mock", str(tiny_model), "--http-port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*run, "--model-name", "tiny"], env=environ, stderr=log)
    try:
        _wait_until_healthy(port)
        assert chat(port).status == 200
        stop = [*DYNAMO, "stop", str(port)]
        stopped = subprocess.run(stop, env=environ, capture_output=True, text=True)
        assert stopped.stdout == f"stopped http-{port}\n"
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.wait()
    assert (tmp_path / "log").read_text().count("is ignored") == 1
    assert not (base / "dynamo" / f"http-{port}").exists()
    assert victim.poll() is None
    outcome("no process signalled; another folder was used and reported once")


def _wait_until_healthy(port: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with suppress(OSError):
            if exchange(port, request_bytes(b"", "/health", method="GET")).status == 200:
                return
        time.sleep(0.1)
    raise AssertionError("not healthy in time")
