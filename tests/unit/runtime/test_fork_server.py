"""The fork server: processes that it forks, the supervisor as their parent, and its own death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime.processes.fork_server import ForkServer, StartedProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux forks workers")

SERVER = """
import json, os, random, socket, sys, threading
from dynamo.runtime.processes.fork_server import become_worker
engines = []
become_worker(engines.append)
print("standard output", flush=True)
facts = {
    "engines": engines,
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "variable": os.environ.get("FORKED"),
    "chance": random.random(),
    "threads": threading.active_count(),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
}
os.write(0, json.dumps(facts).encode())
sys.exit(int(os.read(0, 10) or 0))
"""


class Forks:
    """Forks processes of a server. Each has a socket as its standard input, a pipe as output."""

    def __init__(self) -> None:
        self.server = ForkServer((sys.executable, "-c", SERVER))
        self._ends: list[socket.socket] = []

    async def fork(self, engine: str = "native") -> tuple[StartedProcess, socket.socket, bytes]:
        own, theirs = socket.socketpair()
        self._ends.append(own)
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb", 0) as output, theirs:
            with os.fdopen(writer, "wb", 0):
                fds = (theirs.fileno(), writer, theirs.fileno())
                process = await self.server.fork(engine, {**os.environ, "FORKED": "yes"}, fds)
            return process, own, await asyncio.to_thread(output.readline, 100)

    async def facts(self, own: socket.socket) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(await asyncio.to_thread(own.recv, 4096))
        return facts

    def close(self) -> None:
        self.server.close()
        for own in self._ends:
            own.close()


@pytest.fixture
async def forks() -> AsyncIterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def test_forked_processes_are_children_with_own_streams(forks: Forks) -> None:
    workers = []
    for number in range(2):
        process, own, output = await forks.fork()
        facts = await forks.facts(own)
        workers.append(facts)
        assert output == b"standard output\n"
        assert facts["parent"] == os.getpid()
        assert facts["session"]
        assert facts["variable"] == "yes"
        assert facts["threads"] == 1
        assert set(process.fds) < set(facts["descriptors"])
        own.send(b"%d" % (number + 3))
        assert exit_code(process.pid) == number + 3
    assert workers[0]["engines"] == ["native"]
    assert workers[1]["engines"] == ["native", "native"]
    assert len(workers[0]["descriptors"]) == len(workers[1]["descriptors"])
    assert workers[0]["chance"] != workers[1]["chance"]


async def test_its_death_ends_no_worker_and_the_next_order_starts_another(forks: Forks) -> None:
    others = children()
    process, own, _ = await forks.fork()
    await forks.facts(own)
    (server,) = children() - others - {process.pid}
    os.kill(server, signal.SIGKILL)
    with pytest.raises(OSError):
        await forks.fork()
    later, other, _ = await forks.fork()
    own.send(b"7")
    assert exit_code(process.pid) == 7
    other.send(b"8")
    assert exit_code(later.pid) == 8


async def test_a_server_that_cannot_start_is_an_error() -> None:
    others = children()
    server = ForkServer((sys.executable, "-c", ""))
    with pytest.raises(OSError, match=r"fork server ended|reset|Broken"):
        await server.fork("native", {}, (0, 1))
    assert children() <= others


def children() -> set[int]:
    """Return the children of this process, among them servers of other tests."""
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in text.split()}
